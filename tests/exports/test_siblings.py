"""Tensor scales of matrices that servers fuse, held to float64 arithmetic on the bytes of an export without sharing."""

from __future__ import annotations

import json
import os
import re

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fp4graph
from fp4graph.exports import ExportError
from fp4graph.model.runtime import runtime_of
from fp4graph.model.weight_quantizer import quantize
from tests.exports.models import MXFP4, NVFP4, modelopt_parts

pytest.importorskip("compressed_tensors")
SIBLINGS = ("q_proj", "k_proj", "v_proj")
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(64, 64) for _ in range(4))
        with torch.no_grad():
            self.k_proj.weight.mul_(1.3)
            self.v_proj.weight.mul_(2e-5)  # block scales among E4M3's subnormals

    def forward(self, x):
        return self.o_proj(self.q_proj(x) + self.k_proj(x) + self.v_proj(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x):
        return self.attn(x)


def applied(model, *rules, techniques=("tensor_scaling",)):
    rules = rules or ({"match": {"op": "linear"}, "quantize": NVFP4, "operands": {"fprop.input": "keep"}},)
    policy = {"version": 1, "name": "p", "rules": list(rules), "techniques": list(techniques)}
    fp4graph.apply(model, policy, backend="eager").eval()
    with torch.no_grad():
        model(X)
    return model


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_scales_that_differ_are_refused_by_name(layout, tmp_path):
    model = applied(Net())
    amax = {name: model.attn.get_submodule(name).weight.abs().max().item() / (6 * 448) for name in SIBLINGS}
    listed = ", ".join(f"{name} {gamma:.4g}" for name, gamma in amax.items())
    message = f"attn: γ of {listed}, {max(amax.values()) / min(amax.values()):.6g} times apart. Train with "
    with pytest.raises(ExportError, match=re.escape(message) + r".*siblings}, or give sibling_scales='share'"):
        fp4graph.export(model, tmp_path / "out", format=layout)
    assert os.listdir(tmp_path) == []


def test_a_shared_scale_is_read_as_float64_says(tmp_path, capsys):
    model = applied(Net())
    fp4graph.export(model, tmp_path / "own", format="modelopt", sibling_scales="own")
    assert capsys.readouterr().out == ""
    for layout in ("modelopt", "compressed-tensors"):
        fp4graph.export(model, tmp_path / layout, format=layout, sibling_scales="share")
    own = {name: modelopt_parts(tmp_path / "own", f"attn.{name}") for name in SIBLINGS}
    shared = max(gamma for _, _, gamma in own.values())
    loaded = [fp4graph.load_quantized(Net(), tmp_path / layout) for layout in ("modelopt", "compressed-tensors")]
    errors, squares = {}, np.zeros(2)
    for name, (elements, scales, gamma) in own.items():
        rounded = (scales * gamma / shared).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        before, after = (elements * s * g for s, g in ((scales, gamma), (rounded, shared)))
        for model_read, tolerance in zip(loaded, (0.0, 2**-22), strict=True):  # compressed-tensors stores 1/γ
            weight = model_read.attn.get_submodule(name).weight
            torch.testing.assert_close(weight, torch.tensor(after).float(), rtol=tolerance, atol=0)
        change = np.array([((after - before) ** 2).sum(), (before**2).sum()])
        errors[name], squares = np.sqrt(change[0] / change[1]), squares + change
    assert errors["k_proj"] == 0 < errors["q_proj"] < 2**-4 < errors["v_proj"]
    (record,) = json.loads((tmp_path / "modelopt/sibling_scales.json").read_text())
    assert {name: one["error"] for name, one in record["own"].items()} == pytest.approx(errors, rel=1e-4)
    assert record["error"] == pytest.approx(np.sqrt(squares[0] / squares[1]), rel=1e-4)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"attn: one tensor scale, relative error {record['error']:.2e} (q_proj ")
    divisors = load_file(tmp_path / "compressed-tensors/model.safetensors")
    assert len({divisors[f"attn.{name}.weight_global_scale"].item() for name in SIBLINGS}) == 1
    untouched, again = (modelopt_parts(folder, "attn.o_proj") for folder in (tmp_path / "own", tmp_path / "modelopt"))
    assert all(map(np.array_equal, untouched, again))


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_siblings_that_share_in_training_are_served_as_they_train(layout, tmp_path):
    """A reader that fuses q, k and v and takes the largest scale multiplies with what training multiplied with."""
    model = applied(Net(), techniques=[{"tensor_scaling": {"share": "siblings"}}])
    fp4graph.export(model, tmp_path / "out", format=layout)
    stored = load_file(tmp_path / "out/model.safetensors")
    name = "weight_scale_2" if layout == "modelopt" else "weight_global_scale"
    assert len({stored[f"attn.{each}.{name}"].item() for each in SIBLINGS}) == 1
    loaded = fp4graph.load_quantized(Net(), tmp_path / "out")
    runtime = runtime_of(model)
    trained = {weight.name: quantize(weight, weight.stored, runtime.step) for weight in runtime.weights}
    for each in SIBLINGS:
        read = loaded.attn.get_submodule(each).weight
        tolerance = 0.0 if layout == "modelopt" else 2**-22  # compressed-tensors stores 1/γ
        torch.testing.assert_close(read, trained[f"attn.{each}.weight"], rtol=tolerance, atol=0)


def test_zeros_have_no_say_in_the_shared_scale(tmp_path):
    """γ of a matrix of zeros is 1, under which the others would vanish."""
    model = Net()
    nn.init.zeros_(model.attn.v_proj.weight)
    fp4graph.export(applied(model), tmp_path / "out", format="modelopt", sibling_scales="share")
    loaded = fp4graph.load_quantized(Net(), tmp_path / "out").attn
    assert not loaded.v_proj.weight.any()
    gammas = [modelopt_parts(tmp_path / "out", f"attn.{name}")[2] for name in SIBLINGS]
    assert gammas == [np.float32(model.attn.k_proj.weight.abs().max().item() / (6 * 448))] * 3
    assert (loaded.q_proj.weight != 0).double().mean() > 0.9


def test_a_sibling_without_a_tensor_scale_leaves_the_others_their_range(tmp_path):
    """Its γ of 1 would make zeros of the others: S·γ is below the smallest E4M3 number."""
    rule = {"match": {"op": "linear"}, "quantize": NVFP4, "operands": {"fprop.input": "keep"}}
    rules = [rule | {"match": {"module": "attn.q_proj"}}, rule | {"techniques": ["tensor_scaling"]}]
    model = applied(Net(), *rules, techniques=())
    model.attn.v_proj.weight.data.copy_(Net().attn.v_proj.weight * 50_000)  # as large as q_proj's
    fp4graph.export(model, tmp_path / "out", sibling_scales="share")
    (record,) = json.loads((tmp_path / "out/sibling_scales.json").read_text())
    assert record["own"]["q_proj"]["scale"] == 1
    assert all(one["error"] < 2**-4 for one in record["own"].values())


def test_constants_of_activations_are_shared(tmp_path):
    """The largest magnitude of the input, over κ; q_proj's is half of the others'."""
    scaling = {"tensor_scaling": {"operands": ["fprop.input"]}}
    halved = {"tensor_scaling": {"operands": ["fprop.input"], "target": 224}}
    rules = [
        {"match": {"module": "attn.q_proj"}, "quantize": NVFP4, "techniques": [halved]},
        {"match": {"op": "linear"}, "quantize": NVFP4, "techniques": [scaling]},
    ]
    model = applied(Net(), *rules, techniques=())
    with pytest.raises(ExportError, match=r"attn: γ of the activations of q_proj .*, 2 times apart\. Give"):
        fp4graph.export(model, tmp_path / "out", calibration=[X])
    fp4graph.export(model, tmp_path / "out", calibration=[X], sibling_scales="share", format="modelopt")
    found = load_file(tmp_path / "out/model.safetensors")
    expected = X.abs().max().item() / (6 * 224)
    assert [found[f"attn.{name}.input_scale"].item() for name in SIBLINGS] == pytest.approx([expected] * 3, rel=1e-6)
    (record,) = json.loads((tmp_path / "out/sibling_scales.json").read_text())
    assert record["error"] == 0
    fp4graph.export(model, tmp_path / "weights", activations=False)  # weights alone have no scales here


def test_formats_without_a_tensor_scale_are_not_concerned(tmp_path):
    rules = {"match": {"op": "linear"}, "operands": {"fprop.input": "keep"}}
    for name, spec in {"mxfp4": MXFP4, "nvfp4": NVFP4}.items():
        fp4graph.export(applied(Net(), rules | {"quantize": spec}, techniques=()), tmp_path / name)
        assert sorted(os.listdir(tmp_path / name)) == ["config.json", "model.safetensors"]
