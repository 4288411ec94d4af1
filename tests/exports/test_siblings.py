"""Tensor scales of matrices that servers fuse, compared with float64 arithmetic on an export without sharing."""

from __future__ import annotations

import json
import os
import re
from collections import OrderedDict

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fp4graph
from fp4graph.exports import ExportError
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


LAYOUTS = ("modelopt", "compressed-tensors")
PLAIN = {"match": {"op": "linear"}, "quantize": NVFP4, "operands": {"fprop.input": "keep"}}
SCALED = PLAIN | {"techniques": ["tensor_scaling"]}


def net():
    return nn.Sequential(OrderedDict(attn=Attention()))


def applied(*rules, model=None):
    model = model or net()
    fp4graph.apply(model, {"version": 1, "name": "p", "rules": list(rules)}, backend="eager").eval()
    with torch.no_grad():
        model(X)
    return model


def record_in(folder):
    (record,) = json.loads((folder / "sibling_scales.json").read_text())
    return record


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_that_differ_are_refused_by_name(layout, tmp_path):
    model = applied(SCALED)
    amax = {name: model.attn.get_submodule(name).weight.abs().max().item() / (6 * 448) for name in SIBLINGS}
    listed = ", ".join(f"{name} {gamma:.4g}" for name, gamma in amax.items())
    message = f"attn: γ of {listed}, {max(amax.values()) / min(amax.values()):.6g} times apart. Train with "
    with pytest.raises(ExportError, match=re.escape(message) + r".*siblings}, or give sibling_scales='share'"):
        fp4graph.export(model, tmp_path / "out", format=layout)
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_shared_scale_is_read_as_float64_computes_it(tmp_path, capsys):
    model = applied(SCALED)
    fp4graph.export(model, tmp_path / "own", format="modelopt", sibling_scales="own")
    assert capsys.readouterr().out == ""
    for layout in LAYOUTS:
        fp4graph.export(model, tmp_path / layout, format=layout, sibling_scales="share")
    own = {name: modelopt_parts(tmp_path / "own", f"attn.{name}") for name in SIBLINGS}
    shared = max(gamma for _, _, gamma in own.values())
    loaded = [fp4graph.load_quantized(net(), tmp_path / layout) for layout in LAYOUTS]
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
    record = record_in(tmp_path / "modelopt")
    assert {name: one["error"] for name, one in record["own"].items()} == pytest.approx(errors, rel=1e-4)
    assert record["error"] == pytest.approx(np.sqrt(squares[0] / squares[1]), rel=1e-4)
    line, _ = capsys.readouterr().out.splitlines()
    assert line.startswith(f"attn: one tensor scale, relative error {record['error']:.2e} (q_proj ")
    divisors = load_file(tmp_path / "compressed-tensors/model.safetensors")
    assert len({divisors[f"attn.{name}.weight_global_scale"].item() for name in SIBLINGS}) == 1
    untouched, again = (modelopt_parts(folder, "attn.o_proj") for folder in (tmp_path / "own", tmp_path / "modelopt"))
    assert all(map(np.array_equal, untouched, again))


def test_a_matrix_of_zeros_does_not_change_the_shared_scale(tmp_path):
    """γ of a matrix of zeros is 1; under this γ the others would become zeros too."""
    model = net()
    nn.init.zeros_(model.attn.v_proj.weight)
    fp4graph.export(applied(SCALED, model=model), tmp_path / "out", format="modelopt", sibling_scales="share")
    loaded = fp4graph.load_quantized(net(), tmp_path / "out").attn
    assert not loaded.v_proj.weight.any()
    gammas = [modelopt_parts(tmp_path / "out", f"attn.{name}")[2] for name in SIBLINGS]
    assert gammas == [np.float32(model.attn.k_proj.weight.abs().max().item() / (6 * 448))] * 3
    assert (loaded.q_proj.weight != 0).double().mean() > 0.9


@pytest.mark.slow
def test_a_sibling_without_a_tensor_scale_leaves_the_others_their_range(tmp_path):
    """The sibling's γ is 1; under it the others would become zeros: S·γ is below the smallest E4M3 number."""
    model = applied(PLAIN | {"match": {"module": "attn.q_proj"}}, SCALED)
    model.attn.v_proj.weight.data.copy_(net().attn.v_proj.weight * 50_000)  # as large as q_proj's
    fp4graph.export(model, tmp_path / "out", sibling_scales="share")
    record = record_in(tmp_path / "out")
    assert record["own"]["q_proj"]["scale"] == 1
    assert all(one["error"] < 2**-4 for one in record["own"].values())


@pytest.mark.slow
def test_constants_of_activations_are_shared(tmp_path):
    """A constant is the amax of the input over κ, and q_proj's κ is half of the others'."""
    scaling = {"operands": ["fprop.input"]}
    halved, whole = ({"tensor_scaling": scaling | target} for target in ({"target": 224}, {}))
    model = applied(
        {"match": {"module": "attn.q_proj"}, "quantize": NVFP4, "techniques": [halved]},
        {"match": {"op": "linear"}, "quantize": NVFP4, "techniques": [whole]},
    )
    with pytest.raises(ExportError, match=r"attn: γ of the activations of q_proj .*, 2 times apart\. Give"):
        fp4graph.export(model, tmp_path / "out", calibration=[X])
    fp4graph.export(model, tmp_path / "out", calibration=[X], sibling_scales="share", format="modelopt")
    found = load_file(tmp_path / "out/model.safetensors")
    expected = X.abs().max().item() / (6 * 224)
    assert [found[f"attn.{name}.input_scale"].item() for name in SIBLINGS] == pytest.approx([expected] * 3, rel=1e-6)
    assert record_in(tmp_path / "out")["error"] == 0
    fp4graph.export(model, tmp_path / "weights", activations=False)  # weights alone have no scales here


@pytest.mark.slow
def test_formats_without_a_tensor_scale_write_no_record_of_siblings(tmp_path):
    for name, spec in {"mxfp4": MXFP4, "nvfp4": NVFP4}.items():
        fp4graph.export(applied(PLAIN | {"quantize": spec}), tmp_path / name)
        assert sorted(os.listdir(tmp_path / name)) == ["config.json", "model.safetensors"]
