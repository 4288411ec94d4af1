"""An export that is refused names the weight, its rule and a remedy, and leaves no file."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import fp4graph
from fp4graph.errors import Error
from fp4graph.exports import ExportError
from tests.exports.models import GROUPED, MXFP4, NVFP4, Tied, by_rule, gpt2, llama, mixture, policy, trained
from tests.helpers.models import module_of
from tests.helpers.training import applied
from tests.model.test_adapters import Lora

pytest.importorskip("compressed_tensors")
X = torch.randn(4, 64)


class Net(nn.Module):
    def __init__(self, features: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(features, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


def called(model, data, x):
    with torch.no_grad():
        applied(model, data).eval()(x)
    return model


def under(quantize, *techniques, features: int = 64, **rule):
    """A net whose inner layer a policy quantizes, called once."""
    data = by_rule(quantize, *techniques, **{"match": {"module": "inner"}, **rule})
    return called(Net(features), data, torch.randn(4, features))


def not_finite():
    model = under(MXFP4)
    model.inner.weight.data[3, 5] = torch.nan
    return model


def computed(change):
    """Return a net with a computed weight; exported, its layer would be in high precision beside others in FP4."""
    net = Net()
    change(net.inner)
    return called(net, "mxfp4", X)


def multiplying(multiply, **held):
    """Return a model that multiplies ``x`` with what it holds, called under a policy for all layers."""
    return called(module_of(multiply, **held), by_rule(MXFP4), X)


def adapted():
    net = Net()
    net.outer = Lora(net.outer)  # the policy keeps this layer
    return called(net, by_rule(MXFP4, match={"module": "inner"}), X)


def experts(quantize, **rule):
    return trained(mixture("GPT-OSS"), policy(quantize, **rule), 0)


def conv1d(*data, **rule):
    return trained(gpt2(), policy(*data, **rule), 0)


ACTIVATIONS = partial(under, MXFP4, operands={"fprop.input": {"element": "e4m3"}})
OF_WEIGHTS = {"operands": ["fprop.weight"]}
#: Nets whose inner layer has a quantizer that no format describes, and the error's text.
INEXPRESSIBLE = {
    "element": (partial(under, MXFP4 | {"element": "int4"}), "int4, block 32.*neither MXFP4"),
    "elements": (partial(under, NVFP4 | {"element": ["e2m1", "int4"]}), r"e2m1\|int4, block 16.*neither MXFP4"),
    "block": (partial(under, MXFP4 | {"block": 16}), "block 16, decode scale e8m0.*neither"),
    "scale": (partial(under, NVFP4 | {"scale": {"format": "ue5m3"}}), "ue5m3"),
    "convention": (partial(under, NVFP4 | {"scale": {"format": "e4m3", "convention": "encode"}}), "encode scale"),
    "rotated": (
        partial(under, MXFP4, {"hadamard": {"kind": "deterministic"}}),
        "hadamard transforms both operands.*scope",
    ),
    "rows": (
        partial(under, NVFP4, {"tensor_scaling": {"granularity": "row"} | OF_WEIGHTS}),
        "one such scale.*granularity: tensor",
    ),
    "tensor scale": (
        partial(under, MXFP4, {"tensor_scaling": OF_WEIGHTS}),
        "tensor scale, which MXFP4 does not have.*operands of tensor_scaling",
    ),
    "padding": (partial(under, MXFP4, features=40), "40 columns are not a multiple of the block of 32"),
    "split": (partial(under, MXFP4, {"outlier_clamp": OF_WEIGHTS}), "outlier_clamp splits.*without it"),
    "activations": (ACTIVATIONS, "activations.*--weights-only"),
}


def assert_refused(make, folder, message, error=ExportError, **options):
    """Export the model of ``make()``: there is an error, and no file and no new parent."""
    model = make()
    with pytest.raises(error, match=message):
        fp4graph.export(model, folder / "new" / "out", **options)
    assert os.listdir(folder) == []


@pytest.mark.parametrize("wrong", INEXPRESSIBLE)
def test_what_the_format_cannot_say(wrong, tmp_path):
    make, message = INEXPRESSIBLE[wrong]
    assert_refused(make, tmp_path, rf"(?s)inner\.weight, which rule 'the rule' quantizes: .*{message}")


CONV1D = r"h\.0\.attn\.c_\w+\.weight, .*\[in, out\].*Conv1D.*[kK]eep such layers in high precision"
COMPUTED = r"^cannot export inner, .*computed in the forward.*remove_parametrizations"
MX, IN_MODELOPT, IN_GPT_OSS = partial(under, MXFP4), {"format": "modelopt"}, {"format": "gpt-oss"}
NO_LAYER = r"^cannot export {}, which rule 'the rule' quantizes: checkpoints name weights in FP4 by a layer.*nn\.Linear"
MATRIX = nn.Parameter(torch.randn(64, 64))
#: Models, options of export(), and the text of the error about a weight.
WEIGHTS = {
    "MXFP4 in modelopt": (MX, IN_MODELOPT, r"rule 'the rule' .*do not support MXFP4.*compressed-tensors"),
    "linear in gpt-oss": (MX, IN_GPT_OSS, r"rule 'the rule' .*only the experts of GPT-OSS.*compressed-tensors"),
    "not finite": (not_finite, {}, r"inner\.weight.*holds NaN or Inf"),
    "tied": (
        lambda: called(Tied(), by_rule(MXFP4, match={"module": "head", "role": "head"}), torch.arange(5)),
        {},
        r"embed\.weight is the same parameter.*[Kk]eep head",
    ),
    "weight norm": (partial(computed, parametrizations.weight_norm), {}, COMPUTED),
    "hypernetwork": (
        partial(multiplying, lambda self, x: F.linear(x, 2 * self.w), w=MATRIX),
        {},
        COMPUTED.replace("inner", r"\(root\)"),
    ),
    "layer": (lambda: called(nn.Linear(64, 64), by_rule(MXFP4), X), {}, NO_LAYER.format("weight")),
    "scaled layer": (
        lambda: called(nn.Linear(64, 64), by_rule(NVFP4, "tensor_scaling"), X),
        {"calibration": [X]},
        NO_LAYER.format("weight"),
    ),
    "matrix": (partial(multiplying, lambda self, x: F.linear(x, self.w), w=MATRIX), {}, NO_LAYER.format("w")),
    "list of matrices": (
        partial(multiplying, lambda self, x: F.linear(x, self.ws[0]), ws=nn.ParameterList([MATRIX])),
        {},
        NO_LAYER.format(r"ws\.0"),
    ),
    "attention": (
        partial(multiplying, lambda self, x: self.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(64, 2)),
        {},
        NO_LAYER.format(r"a\.in_proj_weight"),
    ),
    "pruned": (partial(computed, partial(prune.random_unstructured, name="weight", amount=0.5)), {}, COMPUTED),
    "adapted": (adapted, {}, r"cannot export outer: the model has adapters.*Merge them first \(merge_and_unload\)"),
    "smoothed": (
        lambda: trained(llama(num_hidden_layers=1), policy(MXFP4, "smooth_swiglu"), 1),
        {},
        r"down_proj\.weight, .*smooth_swiglu transforms both operands.*a policy without smooth_swiglu$",
    ),
    "conv1d": (partial(conv1d, match={"block": True}), {}, CONV1D),
    "square conv1d": (partial(conv1d, match={"module": "*.attn.c_proj"}), {}, CONV1D),  # fits either way round
    "conv1d in modelopt": (partial(conv1d, NVFP4), IN_MODELOPT, CONV1D),
    "attention in gpt-oss": (
        partial(experts, MXFP4),
        IN_GPT_OSS,
        r"self_attn.*holds only the experts of GPT-OSS.*op: grouped",
    ),
    "experts of gpt-oss elsewhere": (
        partial(experts, MXFP4, **GROUPED),
        {},
        r"experts.*all experts in one tensor.*format='gpt-oss'",
    ),
    "NVFP4 in gpt-oss": (partial(experts, NVFP4, **GROUPED), IN_GPT_OSS, "this layout holds MXFP4"),
}
#: Calls that are wrong whatever the weights are.
CALLS = {
    "unknown format": (MX, {"format": "modelop"}, r"unknown export format 'modelop'.*modelopt"),
    "unknown scales": (MX, {"sibling_scales": "shared"}, "unknown sibling_scales 'shared'; did you mean 'share'"),
    "not called": (
        lambda: applied(Net(), "tetrajet"),
        {},
        r"has not been called since the policy was applied.*call it once",
    ),
    "not applied": (Net, {}, r"export\(\) takes a model that fp4graph\.apply has prepared"),
    "nothing quantized": (lambda: called(Net(), "bf16", X), {}, "'bf16' quantizes no weight in fprop"),
    "no batches": (partial(under, NVFP4, "tensor_scaling"), {"calibration": []}, "calibration= is empty"),
}
LONG = ("conv1d in modelopt", "attention in gpt-oss", "experts of gpt-oss elsewhere", "NVFP4 in gpt-oss")
SLOW = dict.fromkeys(("conv1d", "square conv1d"), pytest.mark.slow) | dict.fromkeys(LONG, pytest.mark.long)


@pytest.mark.parametrize("wrong", [pytest.param(name, marks=SLOW.get(name, ())) for name in (*WEIGHTS, *CALLS)])
def test_wrong_weights_and_calls_are_refused(wrong, tmp_path):
    make, options, message = (WEIGHTS | CALLS)[wrong]
    assert_refused(make, tmp_path, message, Error if wrong in CALLS else ExportError, **options)


def test_unsupported_activations_can_be_left_out_and_rotations_in_the_backward_are_accepted(tmp_path):
    fp4graph.export(ACTIVATIONS(), tmp_path / "out", activations=False)
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    fp4graph.export(under(MXFP4, {"hadamard": {"scope": "backward"}}), tmp_path / "other")


def test_a_folder_that_exists_stays_as_it_is(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(Error, match="out already exists"):
        fp4graph.export(under(MXFP4), tmp_path / "out")
    assert os.listdir(tmp_path / "out") == []


def test_an_interruption_or_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*_):
        assert len(list(tmp_path.glob(".out.*.tmp/model.safetensors"))) == 1
        raise KeyboardInterrupt

    def full(*_):
        raise OSError(28, "No space left on device")

    for function, fails, error, message in (
        ("copy_tokenizer", interrupt, KeyboardInterrupt, "^$"),
        ("write_tensors", full, Error, r"No space left on device.*No files are left"),
    ):
        monkeypatch.setattr(f"fp4graph.exports.api.{function}", fails)
        assert_refused(MX, tmp_path, message, error)


def test_a_phase_without_a_forward_is_refused(tmp_path):
    """The second phase keeps every site, so the next forward does not multiply the weights of the first."""
    phases = [{"at": 1, "rules": [], "default": "keep"}]
    model = called(Net(), by_rule(MXFP4, match={"module": "inner"}) | {"phases": phases}, X)
    fp4graph.export(model, tmp_path / "first")
    model.train()(X).sum().backward()
    with pytest.raises(Error, match="or its present phase began; call it once"):
        fp4graph.export(model, tmp_path / "second")
    with torch.no_grad():
        model(X)
    with pytest.raises(Error, match="quantizes no weight in fprop"):
        fp4graph.export(model, tmp_path / "second")
