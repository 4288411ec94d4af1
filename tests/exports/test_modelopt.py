"""ModelOpt's layout, held to ModelOpt's own functions and read by the converter of compressed-tensors."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import fp4graph
from tests.exports.models import NVFP4, TOKENS, fprop_parameters, llama, mixture, policy, trained

pytestmark = pytest.mark.slow
TWO = {"weights": {"block": [16, 16]}}


def exported(folder, model, **options):
    fp4graph.export(model, folder, format="modelopt", sibling_scales="own", **options)
    return load_file(folder / "model.safetensors"), json.loads((folder / "hf_quant_config.json").read_text())


def values(found, module):
    """Return a weight by the arithmetic of the layout, fp32: element · weight_scale · weight_scale_2."""
    codes = found[f"{module}.weight"]
    assert codes.dtype == torch.uint8
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    each = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()
    signed = magnitudes[each & 7] * torch.where(each > 7, -1.0, 1.0)
    scales = found[f"{module}.weight_scale"]
    assert scales.dtype == torch.float8_e4m3fn
    return signed * scales.float().repeat_interleave(16, -1) * found[f"{module}.weight_scale_2"]


@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3-moe", marks=pytest.mark.long)])
def test_weights_are_what_fprop_multiplies_with(kind, tmp_path):
    model = trained(llama() if kind == "llama" else mixture(kind), policy(NVFP4, "tensor_scaling", operands=TWO))
    found, config = exported(tmp_path / "out", model)
    assert config["quantization"] == {
        "quant_algo": "W4A16_NVFP4",
        "group_size": 16,
        "kv_cache_quant_algo": None,
        "exclude_modules": ["lm_head", *([f"model.layers.{i}.mlp.gate" for i in range(3)] if kind != "llama" else [])],
    }
    wanted = fprop_parameters(model)
    assert wanted
    for key, weight in wanted.items():
        if not key.endswith("proj.weight"):
            continue
        assert torch.equal(values(found, key.removesuffix(".weight")), weight), key
    if kind == "qwen3-moe":
        experts = wanted["model.layers.1.mlp.experts.gate_up_proj"]
        for expert in range(4):
            halves = [values(found, f"model.layers.1.mlp.experts.{expert}.{half}_proj") for half in ("gate", "up")]
            assert torch.equal(torch.cat(halves), experts[expert])


@pytest.mark.long
def test_calibrated_activations_are_read_by_the_converter(tmp_path):
    from compressed_tensors.entrypoints.convert import convert_checkpoint
    from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter

    model = trained(llama(), policy(NVFP4, "tensor_scaling", operands={"fprop.input": {}}))
    found, config = exported(tmp_path / "out", model, calibration=[TOKENS])
    assert config["quantization"]["quant_algo"] == "NVFP4"
    ignore = config["quantization"]["exclude_modules"]
    convert_checkpoint(tmp_path / "out", tmp_path / "converted", ModelOptNvfp4Converter(ignore, ["Linear"]))
    fp4graph.export(model, tmp_path / "own", calibration=[TOKENS], sibling_scales="own")
    own, converted = (load_file(tmp_path / name / "model.safetensors") for name in ("own", "converted"))
    assert own.keys() == converted.keys()
    for key, value in own.items():
        assert torch.equal(value.reshape(-1), converted[key].reshape(-1)), key
    assert found["model.layers.0.mlp.up_proj.input_scale"].dtype == torch.float32


def test_the_configuration_is_the_one_that_modelopt_writes(tmp_path):
    converting = pytest.importorskip("modelopt.torch.export.convert_hf_config")
    model = trained(llama(), policy(NVFP4, "tensor_scaling"), 0)
    for name, options in (("a", {}), ("b", {"activations": False})):
        _, config = exported(tmp_path / name, model, **options)
        embedded = json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        assert embedded == converting.convert_hf_quant_config_format(config)


@pytest.mark.long
def test_modelopt_dequantizes_to_what_fprop_multiplies_with(tmp_path):
    tensors = pytest.importorskip("modelopt.torch.quantization.qtensor.nvfp4_tensor")
    model = trained(llama(), policy(NVFP4, "tensor_scaling"))
    found, _ = exported(tmp_path / "out", model)
    name = "model.layers.1.self_attn.q_proj"
    weight = fprop_parameters(model)[f"{name}.weight"]
    packed = tensors.NVFP4QTensor(weight.shape, torch.float32, found[f"{name}.weight"])
    scale, double = found[f"{name}.weight_scale"], found[f"{name}.weight_scale_2"]
    read = packed.dequantize(scale=scale, double_scale=double, block_sizes={-1: 16})
    torch.testing.assert_close(read, weight, rtol=2**-22, atol=0)  # the scales' product is rounded first
