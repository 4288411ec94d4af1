"""Weights that the forward computes (parametrized, pruned, generated), and weights of layers that it does not call."""

from __future__ import annotations

import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

import fp4graph
from fp4graph.model.runtime import runtime_of
from fp4graph.technique.operands import Operand
from tests.helpers.long import LONG
from tests.helpers.models import module_of
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.training import applied, prepared, stances, uncompiled

NOISE = one_rule(quantize=quantizer() | {"rounding": "stochastic"})
POLICIES = {"no noise": one_rule(), "noise": NOISE, "state": one_rule("q_ema")}


def rounded(x):
    """Round to the values of one_rule()'s quantizer."""
    specs = fp4graph.load_policy(one_rule()).rules[0].specs
    return fp4graph.fake_quantize(x, specs[Operand.FPROP_WEIGHT])


class Hypernetwork(nn.Module):
    """Multiplies with a matrix that another layer generates."""

    def __init__(self):
        super().__init__()
        self.z, self.generator, self.bias = nn.Parameter(torch.randn(4)), nn.Linear(4, 32 * 64), None

    def computed(self):
        return F.linear(rounded(self.z), rounded(self.generator.weight), self.generator.bias).view(32, 64)

    def forward(self, x):
        return F.linear(x, self.generator(self.z).view(32, 64))


class OwnSpectralNorm(nn.Linear):
    """Divides its weight by the largest singular value, in handwritten code."""

    def __init__(self):
        super().__init__(64, 32)
        self.register_buffer("u", torch.randn(32))

    def computed(self):
        v = F.normalize(self.weight.t().mv(self.u), dim=0)
        return self.weight / self.u.dot(self.weight.mv(v))

    def forward(self, x):
        return F.linear(x, self.computed(), self.bias)


#: Each makes a layer with a computed weight from a linear layer.
TECHNIQUES = {
    "weight_norm, old": torch.nn.utils.weight_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm, old": torch.nn.utils.spectral_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "pruning": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "hypernetwork": lambda layer: Hypernetwork(),
    "own spectral norm": lambda layer: OwnSpectralNorm(),
}
pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm` is deprecated:FutureWarning")


def verdict(call):
    """Return the text of the fp4graph.Error that ``call`` raises, or None."""
    try:
        call()
    except fp4graph.Error as error:
        return str(error)
    return None


def made(technique, *, alone):
    torch.manual_seed(0)
    layer = TECHNIQUES[technique](nn.Linear(64, 32))
    return layer if alone else nn.Sequential(layer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("technique", "policy", "alone"),
    [
        *((technique, "noise", False) for technique in TECHNIQUES),
        *(pytest.param(technique, "no noise", False, marks=LONG) for technique in TECHNIQUES),
        *((technique, "noise", True) for technique in ("weight_norm", "hypernetwork")),
        *((technique, "state", False) for technique in ("weight_norm, old", "hypernetwork")),
    ],
)
def test_explain_example_inputs_and_training_agree(technique, policy, alone):
    data, x = POLICIES[policy], torch.randn(8, 64)
    model = applied(made(technique, alone=alone), data)
    prepared(model, torch.optim.SGD)
    outputs = []

    def train():
        for _ in range(2):
            outputs.append(model(x))
            outputs[-1].square().sum().backward()

    trains = verdict(train)
    assert verdict(lambda: fp4graph.explain(made(technique, alone=alone), data, (x,))) == trains
    assert verdict(lambda: applied(made(technique, alone=alone), data, example_inputs=x)) == trains
    if policy == "state":
        assert trains is not None
        assert "q_ema keeps state for each weight, but this product multiplies with a tensor that the forward" in trains
        return
    assert trains is None
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert policy == "no noise" or not torch.equal(*outputs)
    layer = model.eval() if alone else model.eval()[0]
    with torch.no_grad():
        y = model(x)  # an evaluation rounds to nearest
        with fp4graph.bypass(model):
            weight = layer.computed() if hasattr(layer, "computed") else layer.weight
        torch.testing.assert_close(y, F.linear(rounded(x), rounded(weight), layer.bias), rtol=1e-5, atol=1e-5)


class DoRA(nn.Module):
    """Adds a low-rank update to a frozen layer and trains the norms of the sum's rows, in the form of PEFT."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        features = base_layer.in_features, base_layer.out_features
        self.lora_A = nn.ModuleDict({"default": nn.Linear(features[0], 4, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(4, features[1], bias=False)})
        self.lora_magnitude_vector = nn.ParameterDict({"default": base_layer.weight.norm(dim=1)})

    def forward(self, x):
        a, b = self.lora_A["default"], self.lora_B["default"]
        update = b(a(torch.eye(a.in_features))).T
        norms = (self.base_layer.weight + update).norm(dim=1).detach()
        scale = (self.lora_magnitude_vector["default"] / norms).view(1, -1)
        return self.base_layer(x) + (scale - 1) * F.linear(x, self.base_layer.weight) + scale * b(a(x))


def adapted():
    torch.manual_seed(0)
    return nn.Sequential(DoRA(nn.Linear(64, 64)), nn.ReLU(), DoRA(nn.Linear(64, 32)))


@pytest.mark.slow
@uncompiled
def test_explain_finds_the_sites_that_dora_trains():
    data, x = POLICIES["noise"], torch.randn(8, 64)
    model = applied(adapted(), data, example_inputs=x)
    model(x).square().sum().backward()
    trained = {site.module for site in runtime_of(model).sites if site.quantized}
    explained = {site.module for site in fp4graph.explain(adapted(), data, x).sites if site.quantized}
    assert trained == explained == {"0.base_layer", "2.base_layer"}


def gated():
    """Return a module that multiplies with a matrix that is no layer's weight, as SwiftFormer and MViTv2 do."""
    gate = nn.Parameter(torch.randn(64, 64))
    return module_of(lambda self, x: self.fc(x @ self.gate), fc=nn.Linear(64, 64), gate=gate)


@pytest.mark.slow
@uncompiled
@stances
def test_a_technique_with_state_asks_to_keep_a_matrix_that_is_no_weight(stance):
    policy = {"version": 1, "name": "kept", "extends": "tetrajet-qema", "rules": {"before": []}}
    with torch.compiler.set_stance(stance):
        for number in range(2):  # each error asks for a rule for the module that it names, and no more
            model = applied(nn.Sequential(gated(), gated()), policy if number else "tetrajet-qema")
            text = r"q_ema keeps .* parameter 'gate', the weight of no layer"
            with pytest.raises(fp4graph.CaptureError, match=text) as error:
                model(torch.randn(8, 64))
            rule = yaml.safe_load(str(error.value).partition("[...]}'): ")[2])
            policy["rules"]["before"].append(rule | {"name": f"gate-{number}"})
        applied(model, policy)(torch.randn(8, 64)).sum().backward()


class Borrows(nn.Sequential):
    def forward(self, x):
        return F.linear(F.gelu(F.linear(x, self[0].weight, self[0].bias)), self[1].weight, self[1].bias)


@pytest.mark.inductor
def test_all_borrowed_weights_are_marked_at_once():
    model = nn.Sequential(*(Borrows(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)))
    applied(nn.Linear(64, 64), "tetrajet-qema")(torch.randn(8, 64))  # the first call of a process has one frame more
    torch._dynamo.utils.counters.clear()
    applied(model, "tetrajet-qema")(torch.randn(8, 64)).sum().backward()
    assert torch._dynamo.utils.counters["frames"]["total"] == 2
