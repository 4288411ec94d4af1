"""tensor_scaling with ``share: siblings``: siblings train as the one matrix into which servers fuse them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.errors import CaptureError, PolicyError, PolicyWarning
from fp4graph.model.runtime import runtime_of
from fp4graph.model.weight_quantizer import quantize
from tests.helpers.models import llama, module_of
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.training import applied
from tests.plugins.layer import gaussian

pytestmark = pytest.mark.usefixtures("operation_by_operation")

SIBLINGS = ("q_proj", "k_proj", "v_proj")


class Attention(nn.Module):
    """Three projections of one tensor; ``fused`` is the matrix into which a server fuses them."""

    def __init__(self, names=SIBLINGS):
        super().__init__()
        torch.manual_seed(0)
        self.names = names
        for index, name in enumerate(names):
            self.add_module(name, nn.Linear(64, 48))
            getattr(self, name).weight.data.mul_(3.0**index)

    def forward(self, x):
        return torch.cat([getattr(self, name)(x) for name in self.names], -1)

    def fused(self):
        layer = nn.Linear(64, 48 * len(self.names))
        layers = [getattr(self, name) for name in self.names]
        layer.load_state_dict({key: torch.cat([getattr(each, key) for each in layers]) for key in ("weight", "bias")})
        return nn.Sequential(layer)


X = gaussian(32, 64, seed=1)
#: The backward is exact, because the fused dY would have one tensor scale, and the three dY have three.
EXACT = {"quantize": NVFP4, "operands": {"backward": "keep"}}
FUSED = one_rule("tensor_scaling", **EXACT)


def policy(*more, **options):
    return one_rule({"tensor_scaling": {"share": "siblings", **options}}, *more, **EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_siblings_are_served_as_they_train(backend, autocast):
    """Bit for bit, also after a step has changed the weights, and in evaluation."""
    apart = Attention()
    fused = fp4graph.apply(apart.fused(), FUSED, backend=backend)
    apart = fp4graph.apply(apart, policy(), backend=backend)
    for _ in range(2):
        results = []
        for model in (apart, fused):
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                y = model(torch.eye(64))  # the quantized weights: no sums, whose order depends on the matrix
            y.float().square().mean().backward()
            results.append(y)
        assert torch.equal(*results)
        weights = torch.cat([getattr(apart, name).weight.grad for name in SIBLINGS])
        torch.testing.assert_close(weights, fused[0].weight.grad)  # sums in another order
        with torch.no_grad():
            for name, rows in zip(SIBLINGS, (fused[0].weight * 1.5).split(48), strict=True):
                getattr(apart, name).weight.copy_(rows)
            fused[0].weight.mul_(1.5)
    with torch.no_grad():
        assert torch.equal(apart.eval()(torch.eye(64)), fused.eval()(torch.eye(64)))


@pytest.mark.parametrize("names", [SIBLINGS, ("one", "two")])
def test_names_or_groups_make_siblings(names):
    model = Attention(names)
    fused = applied(model.fused(), FUSED)
    alone = applied(copy.deepcopy(model), FUSED if names == SIBLINGS else policy())
    together = applied(model, policy(**({} if names == SIBLINGS else {"groups": [list(names)]})))
    assert torch.equal(together(torch.eye(64)), fused(torch.eye(64)))
    assert not torch.equal(alone(torch.eye(64)), fused(torch.eye(64)))


def experts(x, technique, **stacks):
    """Return the outputs of experts whose gates and ups are two stacks ``[E, K, N]``, or one stack."""
    model = module_of(
        lambda self, x, ends: torch.cat([torch._grouped_mm(x, w, offs=ends) for w in self.parameters()], -1),
        **{name: nn.Parameter(stack.clone()) for name, stack in stacks.items()},
    )
    rule = one_rule(technique, quantize=NVFP4, op="grouped", operands={"backward": "keep"})
    return applied(model.bfloat16(), rule)(x.bfloat16(), torch.tensor([8, 16, 32], dtype=torch.int32))


def test_each_expert_shares_a_scale_between_its_siblings():
    w1, w3 = gaussian(3, 64, 32), gaussian(3, 64, 32, seed=1) * torch.tensor([0.5, 2.0, 30.0]).reshape(3, 1, 1)
    fused = experts(X, "tensor_scaling", w13=torch.cat([w1, w3], -1))
    assert torch.equal(experts(X, {"tensor_scaling": {"share": "siblings"}}, w1=w1, w3=w3), fused)
    assert not torch.equal(experts(X, "tensor_scaling", w1=w1, w3=w3), fused)


def test_weights_quantized_for_the_optimizer_are_those_of_the_next_forward():
    model = applied(Attention(), policy())
    model(X)
    with torch.no_grad():
        model.v_proj.weight.mul_(7.0)  # as a step does
        runtime = runtime_of(model)
        (q,) = (weight for weight in runtime.weights if weight.fqn == "q_proj")
        seen = quantize(q, q.stored, runtime.step)
        model.q_proj.bias.zero_()
        # The product is multiplied by γ at the end, which rounds once more.
        torch.testing.assert_close(seen, model(torch.eye(64))[:, :48].mT, rtol=2**-22, atol=0)


def test_siblings_inside_adapters_share_too():
    """PEFT wraps a linear layer as ``base_layer``; here one sibling has no adapter."""
    wrapped = Attention()
    for name in SIBLINGS[:2]:
        setattr(wrapped, name, nn.Sequential(OrderedDict(base_layer=getattr(wrapped, name))))
    assert torch.equal(applied(wrapped, policy())(X), applied(Attention(), policy())(X))


def test_loaded_or_changed_weights_change_the_scale_at_once():
    """In evaluation, also in inference mode, and if weights change through ``data``."""
    model = applied(Attention(), policy()).eval()
    with torch.inference_mode():
        model(X)
    other = Attention()
    other.v_proj.weight.data.mul_(11.0)
    model.load_state_dict(other.state_dict())
    expected = applied(other, policy()).eval()
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            assert torch.equal(model(X), expected(X))
        for each in (model, expected):
            each.v_proj.weight.data.mul_(0.5)


def test_sharing_adds_no_key_to_state_dicts_and_a_copy_has_separate_weights():
    model = applied(Attention(), policy())
    assert model.state_dict().keys() == Attention().state_dict().keys()
    expected = model(X)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.v_proj.weight.mul_(5.0)
    assert torch.equal(twin(X), expected)


OTHER_TARGET = [{"tensor_scaling": {"share": "siblings", "target": 300}}]


@pytest.mark.parametrize(
    ("sibling", "rule", "options", "message"),  # ``rule`` is for one sibling only
    [
        ("k_proj", {"keep": "tried"}, {}, "shares its tensor scale with k_proj"),
        ("k_proj", {"quantize": {**NVFP4, "block": 32}}, {}, "let one rule"),
        (
            "q_proj",
            {"quantize": NVFP4, "techniques": OTHER_TARGET},
            {},
            "let one rule with one tensor_scaling decide both",
        ),
        (None, {}, {"granularity": "row"}, "use granularity: tensor"),
        (None, {}, {"operands": ["fprop.input"]}, "does not list"),
    ],
    ids=["kept", "another quantizer", "another target", "rows", "no weight"],
)
def test_siblings_that_cannot_share_are_refused(sibling, rule, options, message):
    written = policy(**options)
    if sibling:
        written["rules"].insert(0, {"name": "own", "match": {"module": sibling}, **rule})
    with pytest.raises((PolicyError, CaptureError), match=message):
        applied(Attention(), written)


class CrossAttention(Attention):
    """A query that reads x, and a key and a value that read another tensor."""

    def forward(self, x, other):
        return torch.cat([self.q_proj(x), self.k_proj(other), self.v_proj(other)], -1)


def test_siblings_of_a_cross_attention_share_too():
    """vLLM fuses only k and v there; the scale of all three fits them."""
    crossed = applied(CrossAttention(), policy())(torch.eye(64), torch.eye(64).roll(1, 0))
    expected = applied(Attention(), policy())(torch.eye(64))
    assert torch.equal(crossed, torch.cat([expected[:, :48], expected[:, 48:].roll(1, 0)], -1))


def test_a_layer_in_two_groups_is_refused():
    with pytest.raises(PolicyError, match="belongs to two groups of siblings"):
        applied(Attention(), policy(groups=[["q_proj", "k_proj"]]))
    model = nn.ModuleDict({"one": Attention(), "two": Attention()})
    model.two.q_proj = model.one.q_proj
    with pytest.raises(PolicyError, match=r"q_proj\.weight belongs to two groups of siblings"):
        applied(model, policy())


@pytest.mark.parametrize("technique", [{"hadamard": {"scope": ["fprop"]}}, {"smooth_max": {"kind": "softmax"}}])
def test_techniques_that_change_the_weight_before_its_scale_are_refused(technique):
    with pytest.raises((PolicyError, CaptureError), match="shares the scale of the weights of siblings"):
        applied(Attention(), policy(technique))


@pytest.mark.slow
@pytest.mark.captured
def test_explain_names_the_groups():
    ids = torch.zeros(2, 8, dtype=torch.long)
    shown = fp4graph.explain(llama(), policy(), (ids,))
    groups = [tuple(name.split(".")[-2] for name in group) for group in shown.siblings]
    assert groups == [SIBLINGS, ("gate_proj", "up_proj")] * 2
    assert "q_proj, k_proj, v_proj (in 2 modules); gate_proj, up_proj (in 2 modules)" in str(shown)


@pytest.mark.parametrize("names", [["alpha", "beta"], ["attn.q_proj", "attn.o_proj"], ["o_proj", "absent"]])
def test_a_group_without_two_members_in_a_module_is_warned_about(names):
    with pytest.warns(PolicyWarning, match=r"groups has .*, but no module holds two quantized layers"):
        applied(Attention(), policy(groups=[names]))
