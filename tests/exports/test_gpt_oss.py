"""GPT-OSS's layout, read by transformers' MXFP4 loader in its dequantizing mode."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

import fp4graph
from fp4graph.exports import ExportError
from tests.exports.models import MXFP4, NVFP4, TOKENS, fprop_parameters, mixture, policy, trained

pytestmark = pytest.mark.slow
EXPERTS = {"match": {"op": "grouped"}}


@pytest.mark.long
def test_experts_are_read_bit_for_bit(tmp_path):
    data = policy(MXFP4, **EXPERTS)
    data["rules"].insert(0, {"name": "first", "match": {"first_blocks": 1, "op": "grouped"}, "keep": "x"})
    model = trained(mixture("gpt-oss"), data)
    fp4graph.export(model, tmp_path / "out", format="gpt-oss")
    quantization = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    assert quantization["quant_method"] == "mxfp4"
    assert "model.layers.0.mlp.experts" in quantization["modules_to_not_convert"]
    assert "model.layers.1.mlp.experts" not in quantization["modules_to_not_convert"]
    reader = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out",
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="grouped_mm",
        quantization_config=transformers.Mxfp4Config(dequantize=True),
    ).eval()
    wanted = fprop_parameters(model)
    assert len(wanted) == 4
    expected = fp4graph.strip(model.state_dict()) | {key: weight.mT for key, weight in wanted.items()}
    for key, value in reader.state_dict().items():
        assert torch.equal(value, expected[key]), key
    with torch.no_grad():
        assert torch.equal(reader(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.long
def test_linear_layers_and_nvfp4_are_refused(tmp_path):
    model = trained(mixture("gpt-oss"), policy(MXFP4), 0)
    with pytest.raises(ExportError, match=r"self_attn.*holds only the experts of GPT-OSS.*op: grouped"):
        fp4graph.export(model, tmp_path / "out", format="gpt-oss")
    with pytest.raises(ExportError, match=r"experts.*all experts in one tensor.*format='gpt-oss'"):
        fp4graph.export(trained(mixture("gpt-oss"), policy(MXFP4, **EXPERTS), 0), tmp_path / "out")
    with pytest.raises(ExportError, match="this layout holds MXFP4"):
        fp4graph.export(trained(mixture("gpt-oss"), policy(NVFP4, **EXPERTS), 0), tmp_path / "out", format="gpt-oss")
