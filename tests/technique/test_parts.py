"""Parts of techniques: the methods that their classes inherit, their state, and equal lines that wrappers pass on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4graph
from fp4graph.errors import CaptureError
from fp4graph.graph.plan import plan_site
from fp4graph.technique import (
    BlockScale,
    Operand,
    OptimizerHook,
    Part,
    Rounding,
    StateEntry,
    Technique,
    Wrapper,
    hooks_of,
    parts_of,
)
from fp4graph.technique.registry import Registry
from fp4graph.technique.site import SiteView
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.techniques import FPROP, Offers, technique

WEIGHT = frozenset({Operand.FPROP_WEIGHT})


def made(*parts: Callable[..., Part]) -> type[Technique]:
    """Return a technique with these parts at every site; each is called with the technique as its options."""
    return technique("made", parts=lambda self, site: tuple(part(options=self) for part in parts))


def policy(cls: type[Technique], **more: Any) -> fp4graph.policy.Policy:
    registry = Registry([("made", Offers(cls))], entry_point_group=None)
    return fp4graph.load_policy(one_rule("made", quantize=quantizer(16), **more), registry)


def applied(cls: type[Technique]) -> nn.Module:
    """Return a model of one layer, of 64 inputs and 32 outputs, under a technique."""
    torch.manual_seed(0)
    return fp4graph.apply(nn.Sequential(nn.Linear(64, 32)), policy(cls), backend="eager")


X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


class Larger:
    """A mixin that is not a part."""

    def block_statistic(self, values: Tensor, z: Tensor, context: Any) -> Tensor:
        return z * 8


class Mixed(Larger, BlockScale):
    mixes = "block"


class Further(Mixed):
    """Inherits all methods and fields."""


def of(kind: type[Part], **members: Any) -> Any:
    """Return a class of that kind with these members, which mixes nothing."""
    return type(f"Made{kind.__name__}", (kind,), {"__module__": __name__, "mixes": "none", **members})


Rounds = of(Rounding, round=lambda self, ratio, scale, context: ratio.round())
Noisy = of(Wrapper, draws=True, after=lambda self, x, context: x + context.gaussian(1))
Reads = of(Rounding, round=lambda self, ratio, scale, context: ratio.round() + context.state["e"])


class Counts(Part):
    """Counts forwards in an entry."""

    mixes = "none"
    entry: str

    def observe(self, quantization: Any, context: Any) -> dict[str, Tensor]:
        return {self.entry: context.state[self.entry] + 1}


LIKE_WEIGHT = StateEntry("e", Operand.FPROP_WEIGHT, torch.zeros_like)
ENTRIES = tuple(
    StateEntry(name, Operand.FPROP_WEIGHT, lambda w: w.new_zeros(()), writer="graph", weight_like=False)
    for name in ("a", "b")
)


@pytest.mark.parametrize("part", [Mixed, Further])
def test_inherited_methods_act(part: type[Part]) -> None:
    assert part.acted == {"block_statistic"}
    larger, hook = (made(partial(kind, operands=FPROP)) for kind in (part, OptimizerHook))
    assert not torch.equal(applied(larger)(X), applied(hook)(X))


def test_a_class_of_two_kinds_is_refused() -> None:
    with pytest.raises(TypeError, match="Both is a BlockScale and a Rounding; make a part of each"):
        type("Both", (Mixed, Rounding), {"__module__": __name__})


def test_a_part_without_methods_as_of_a_misspelt_one_is_refused() -> None:
    misspelt = of(BlockScale, block_statstic=Larger.block_statistic)
    with pytest.raises(fp4graph.PluginError, match=", a BlockScale, has no method and does nothing"):
        policy(made(partial(misspelt, operands=FPROP)))


@pytest.mark.parametrize("collection", [set, list, tuple])
def test_operands_may_be_any_collection_of_operands(collection: Any) -> None:
    mixed = made(partial(Mixed, operands=collection(WEIGHT)))
    (part,) = parts_of(mixed())
    assert part.operands == WEIGHT
    assert applied(mixed)(X).isfinite().all()


def test_state_that_a_part_lists_exists_in_evaluation_even_if_the_part_does_not_act() -> None:
    listing = partial(Noisy, operands=WEIGHT, state=(LIKE_WEIGHT,))
    model = applied(made(listing, partial(Reads, operands=WEIGHT)))
    noisy = model(X)
    assert torch.equal(model.eval()(X), model(X))
    assert not torch.equal(model(X), noisy)


def test_state_has_the_layout_of_the_tensor_that_a_method_receives() -> None:
    seen: dict[str, tuple[Any, Any]] = {}

    def seeing(stage: str) -> Callable[..., None]:
        def method(self: Part, x: Tensor, *rest: Any) -> None:
            seen[stage] = tuple(x.shape), tuple(rest[-1].state["e"].shape)

        return method

    around = partial(of(Wrapper, split=seeing("split")), operands=WEIGHT, state=(LIKE_WEIGHT,))
    applied(made(around, partial(of(Rounding, round=seeing("round")), operands=WEIGHT)))(X)
    assert seen == {"split": ((32, 64), (32, 64)), "round": ((32, 4, 16), (32, 4, 16))}


def test_each_part_may_observe_a_separate_entry() -> None:
    counts = [partial(Counts, operands=WEIGHT, entry=each.name, state=(each,)) for each in ENTRIES]
    model = applied(made(*counts))
    for _ in range(2):
        model(X).sum().backward()
    assert [value.item() for name, value in model.state_dict().items() if name.endswith(("_a", "_b"))] == [2, 2]


def test_an_entry_that_is_not_observed_is_an_error() -> None:
    counts = made(partial(Counts, operands=WEIGHT, entry="a", state=ENTRIES))
    with pytest.raises(fp4graph.PluginError, match=r"observe: returned no values of \['b'\], which are due"):
        applied(counts)(X).sum().backward()


def test_a_technique_that_refuses_experts_acts_elsewhere() -> None:
    def parts(self: Technique, site: Any) -> tuple[Part, ...]:
        if site.op == "grouped":
            raise ValueError("not for experts")
        return Mixed(options=self, operands=WEIGHT), OptimizerHook(options=self)

    refuses = technique("made", parts=parts)
    assert len(hooks_of(refuses())) == 1
    assert applied(refuses)(X).isfinite().all()
    with pytest.raises(CaptureError, match="technique made: not for experts"):
        plan_site(SiteView("m", "grouped", 64, 32, 64 * 32), policy(refuses).rules[0])


@pytest.mark.parametrize("element", ["fprop.input", "fprop.weight"])
def test_several_elements_are_refused_only_where_elements_are_rounded(element: str) -> None:
    cls = made(partial(Rounds, operands=WEIGHT), partial(Mixed, operands={Operand.FPROP_INPUT}))
    several = {"operands": {element: {"element": ["e2m1", "int4"]}}}
    if element == "fprop.input":
        assert policy(cls, **several).quantizes
    else:
        with pytest.raises(fp4graph.PolicyError, match=r"the blocks of fprop\.weight choose between"):
            policy(cls, **several)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("block", "beside"),
    [
        (16, []),
        ("row", ["tensor_scaling"]),
        ("tensor", ["tensor_scaling"]),
        (16, ["hadamard", {"tensor_scaling": {"granularity": "row"}}]),
        (16, ["stochastic_rounding"]),  # from here on quantizers do not, or may not, quantize equal lines alike
        (16, ["four_over_six"]),
        ("row", ["smooth_max"]),
    ],
    ids=str,
)
def test_one_line_stands_for_an_operand_of_equal_lines(block: Any, beside: list[Any], axis: int) -> None:
    """A wrapper may pass one line, or one element of each line, in place of an operand with equal lines or elements."""
    results = []
    for whole in (True, False):

        def around(self: Any, quantize: Any, x: Tensor, context: Any, whole: bool = whole) -> Tensor:
            line = x.narrow(axis, 0, 1)
            return quantize(x) + quantize(line.expand(x.shape).contiguous() if whole else line)

        registry = Registry([("made", Offers(technique("made", frozenset(Operand), around=around)))])
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 32)), X.clone().requires_grad_()
        rule = one_rule("made", *beside, quantize=quantizer(block, "e4m3", "nearest_even"))
        y = fp4graph.apply(model, fp4graph.load_policy(rule, registry), seed=3, backend="eager")(x)
        y.backward(y.detach().roll(1))
        results.append((y, x.grad, *(p.grad for p in model.parameters())))
    assert all(map(torch.equal, *results))
