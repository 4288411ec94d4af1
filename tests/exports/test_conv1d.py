"""GPT-2, whose Conv1D holds weights as [in, out]: readers of FP4 weights know nn.Linear alone."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from torch.nn import Linear, Sequential
from transformers.pytorch_utils import Conv1D

import fp4graph
from fp4graph.exports import ExportError
from tests.exports.models import MXFP4, NVFP4, TOKENS, gpt2, policy, trained

pytest.importorskip("compressed_tensors")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "quantize"), [("compressed-tensors", MXFP4), pytest.param("modelopt", NVFP4, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("match", [{"block": True}, {"module": "*.attn.c_proj"}])  # [64, 64] fits either way round
def test_a_quantized_conv1d_is_refused(layout, quantize, match, tmp_path):
    model = trained(gpt2(), policy(quantize, match=match), 0)
    message = r"h\.0\.attn\.c_\w+\.weight, .*\[in, out\].*Conv1D.*[kK]eep such layers in high precision"
    with pytest.raises(ExportError, match=message):
        fp4graph.export(model, tmp_path / "out", format=layout)
    assert os.listdir(tmp_path) == []


def test_a_packed_weight_is_not_read_into_a_conv1d(tmp_path):
    """Such as ModelOpt writes of GPT-2. A square matrix would fit either way round."""
    rule = {"match": {"op": "linear"}, "quantize": MXFP4}
    linear = fp4graph.apply(Sequential(Linear(64, 64)), {"version": 1, "name": "p", "rules": [rule]}, backend="eager")
    linear(torch.randn(2, 64))
    fp4graph.export(linear, tmp_path / "out")
    with pytest.raises(fp4graph.Error, match=r"'0\.weight_packed' is \[out, in\], but 0\.weight belongs to a Conv1D"):
        fp4graph.load_quantized(Sequential(Conv1D(64, 64)), tmp_path / "out")


@pytest.mark.long
def test_a_kept_conv1d_is_read_beside_a_quantized_linear_layer(tmp_path):
    model = trained(gpt2(), policy(match={"module": "lm_head"}))
    fp4graph.export(model, tmp_path / "out")
    how = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True), "dtype": torch.float32}
    reader = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager", **how)
    loaded = fp4graph.load_quantized(gpt2(), tmp_path / "out").eval()
    with torch.no_grad():
        y = model(TOKENS).logits
        assert torch.equal(reader.eval()(TOKENS).logits, y)
        assert torch.equal(loaded(TOKENS).logits, y)
