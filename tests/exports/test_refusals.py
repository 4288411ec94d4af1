"""What cannot be exported is an error with the weight, its rule and a remedy, and leaves nothing behind."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fp4graph
from fp4graph.errors import Error
from fp4graph.exports import ExportError
from tests.exports.models import MXFP4, NVFP4

pytest.importorskip("compressed_tensors")


class Net(nn.Module):
    def __init__(self, features: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(features, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


def under(quantize, *techniques, features: int = 64, **rule):
    """A net whose inner layer a policy quantizes, called once."""
    rule = {"name": "the rule", "match": {"module": "inner"}, "quantize": quantize, **rule}
    policy = {"version": 1, "name": "p", "rules": [rule], "techniques": list(techniques)}
    model = fp4graph.apply(Net(features), policy, backend="eager").eval()
    with torch.no_grad():
        model(torch.randn(4, features))
    return model


WRONG = {
    "element": ((MXFP4 | {"element": "int4"},), {}, "int4, block 32.*neither MXFP4"),
    "elements": ((NVFP4 | {"element": ["e2m1", "int4"]},), {}, r"e2m1\|int4, block 16.*neither MXFP4"),
    "block": ((MXFP4 | {"block": 16},), {}, "block 16, decode scale e8m0.*neither"),
    "scale": ((NVFP4 | {"scale": {"format": "ue5m3"}},), {}, "ue5m3"),
    "convention": ((NVFP4 | {"scale": {"format": "e4m3", "convention": "encode"}},), {}, "encode scale"),
    "rotated": ((MXFP4, {"hadamard": {"kind": "deterministic"}}), {}, "hadamard transforms both operands.*scope"),
    "rows": (
        (NVFP4, {"tensor_scaling": {"granularity": "row", "operands": ["fprop.weight"]}}),
        {},
        "one for the matrix.*granularity: tensor",
    ),
    "tensor scale": (
        (MXFP4, {"tensor_scaling": {"operands": ["fprop.weight"]}}),
        {},
        "tensor scale, which MXFP4 does not have.*operands of tensor_scaling",
    ),
    "padding": ((MXFP4,), {"features": 40}, "40 columns are not a multiple of the block of 32"),
    "split": ((MXFP4, {"outlier_clamp": {"operands": ["fprop.weight"]}}), {}, "outlier_clamp splits.*without it"),
    "activations": ((MXFP4,), {"operands": {"fprop.input": {"element": "e4m3"}}}, "activations.*--weights-only"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_format_cannot_say(wrong, tmp_path):
    given, more, message = WRONG[wrong]
    model = under(*given, **more)
    with pytest.raises(ExportError, match=rf"(?s)inner\.weight, which rule 'the rule' quantizes: .*{message}"):
        fp4graph.export(model, tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_activations_that_nobody_knows_are_left_out_on_request(tmp_path):
    given, more, _ = WRONG["activations"]
    fp4graph.export(under(*given, **more), tmp_path / "out", activations=False)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_rotation_in_the_backward_alone_is_no_hindrance(tmp_path):
    fp4graph.export(under(MXFP4, {"hadamard": {"scope": "backward"}}), tmp_path / "out")


@pytest.mark.parametrize(
    ("layout", "message"), [("modelopt", "do not support MXFP4"), ("gpt-oss", "only the experts of GPT-OSS")]
)
def test_a_layout_that_does_not_hold_the_weight(layout, message, tmp_path):
    with pytest.raises(ExportError, match=rf"rule 'the rule' .*{message}.*compressed-tensors"):
        fp4graph.export(under(MXFP4), tmp_path / "out", format=layout)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_exists_stays_as_it_is(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(Error, match="out already exists"):
        fp4graph.export(under(MXFP4), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        assert len(list(tmp_path.glob(".out.*.tmp/model.safetensors"))) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr("fp4graph.exports.api.copy_tokenizer", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fp4graph.export(under(MXFP4), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fp4graph.exports.api.write_tensors", full)
    with pytest.raises(Error, match=r"No space left on device.*No files are left"):
        fp4graph.export(under(MXFP4), tmp_path / "out")
    assert os.listdir(tmp_path) == []


def test_a_format_that_nobody_knows(tmp_path):
    with pytest.raises(Error, match=r"unknown export format 'modelop'.*modelopt"):
        fp4graph.export(under(MXFP4), tmp_path / "out", format="modelop")


def test_a_model_that_was_not_called(tmp_path):
    with pytest.raises(Error, match=r"has not been called since the policy was applied or.*call it once"):
        fp4graph.export(fp4graph.apply(Net(), "tetrajet", backend="eager"), tmp_path / "out")
    with pytest.raises(Error, match=r"export\(\) takes a model that fp4graph\.apply has prepared"):
        fp4graph.export(Net(), tmp_path / "out")


def test_a_phase_that_no_forward_has_shown(tmp_path):
    """The second phase keeps everything: what the first forward multiplied with is no longer what the next one will."""
    rule = {"name": "the rule", "match": {"module": "inner"}, "quantize": MXFP4}
    policy = {"version": 1, "name": "p", "rules": [rule], "phases": [{"at": 1, "rules": [], "default": "keep"}]}
    model = fp4graph.apply(Net(), policy, backend="eager")
    with torch.no_grad():
        model(torch.randn(2, 64))
    fp4graph.export(model, tmp_path / "first")
    model(torch.randn(2, 64)).sum().backward()
    with pytest.raises(Error, match="or its present phase began; call it once"):
        fp4graph.export(model, tmp_path / "second")
    with torch.no_grad():
        model(torch.randn(2, 64))
    with pytest.raises(Error, match="quantizes no weight in fprop"):
        fp4graph.export(model, tmp_path / "second")


def test_a_policy_that_quantizes_nothing(tmp_path):
    model = fp4graph.apply(Net(), "bf16", backend="eager")
    model(torch.randn(2, 64))
    with pytest.raises(Error, match="'bf16' quantizes no weight in fprop"):
        fp4graph.export(model, tmp_path / "out")


def test_weights_that_are_not_finite(tmp_path):
    model = under(MXFP4)
    with torch.no_grad():
        model.inner.weight[3, 5] = torch.nan
    with pytest.raises(ExportError, match=r"inner\.weight.*holds NaN or Inf"):
        fp4graph.export(model, tmp_path / "out")


def test_a_weight_that_an_embedding_shares(tmp_path):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(96, 64), nn.Linear(64, 96, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x):
            return self.head(self.embed(x))

    rule = {"name": "the rule", "match": {"module": "head", "role": "head"}, "quantize": MXFP4}
    model = fp4graph.apply(Tied(), {"version": 1, "name": "p", "rules": [rule]}, backend="eager")
    model(torch.arange(5))
    with pytest.raises(ExportError, match=r"embed\.weight is the same parameter.*[Kk]eep head"):
        fp4graph.export(model, tmp_path / "out")


def test_no_batches_to_calibrate_on(tmp_path):
    model = under(NVFP4, "tensor_scaling")
    with pytest.raises(Error, match="calibration= is empty"):
        fp4graph.export(model, tmp_path / "out", calibration=[])


@pytest.mark.parametrize(
    "change", [nn.utils.parametrizations.weight_norm, lambda m: prune.random_unstructured(m, "weight", 0.5)]
)
def test_a_weight_that_a_forward_computes(change, tmp_path):
    """Its layer would be served in high precision, beside the others in FP4."""
    net = Net()
    change(net.inner)
    model = fp4graph.apply(net, "mxfp4", backend="eager").eval()
    with torch.no_grad():
        model(torch.randn(4, 64))
    with pytest.raises(ExportError, match=r"^cannot export inner, .*computed in the forward.*remove_parametrizations"):
        fp4graph.export(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())
