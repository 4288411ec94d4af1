"""Parts of techniques: what their classes inherit, and what several parts of one technique share."""

from __future__ import annotations

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


def applied(cls: type[Technique]) -> nn.Module:
    """A layer of 64 inputs and 32 outputs under a technique."""
    registry = Registry([("made", Offers(cls))], entry_point_group=None)
    policy = fp4graph.load_policy(one_rule(cls.name, quantize=quantizer(16)), registry)
    torch.manual_seed(0)
    return fp4graph.apply(nn.Sequential(nn.Linear(64, 32)), policy, backend="eager")


class Larger:
    """A mixin that is no part."""

    def block_statistic(self, values: Tensor, z: Tensor, context: Any) -> Tensor:
        return z * 8


class Mixed(Larger, BlockScale):
    mixes = "block"


class Further(Mixed):
    """Inherits all that it does."""


class Rounds(Rounding):
    """Rounds elements to whole numbers."""

    mixes = "none"

    def round(self, ratio: Tensor, scale: Tensor, context: Any) -> Tensor:
        return ratio.round()


class Noisy(Wrapper):
    """Adds noise in training."""

    mixes = "none"
    draws = True

    def after(self, x: Tensor, context: Any) -> Tensor:
        return x + context.gaussian(1)


class Counts(Part):
    """Counts forwards in an entry."""

    mixes = "none"
    entry: str

    def observe(self, quantization: Any, context: Any) -> dict[str, Tensor]:
        return {self.entry: context.state[self.entry] + 1}


def zero(weight: Tensor) -> Tensor:
    return weight.new_zeros(())


def counted(name: str) -> StateEntry:
    return StateEntry(name, Operand.FPROP_WEIGHT, zero, writer="graph", weight_like=False)


LIKE_WEIGHT = StateEntry("e", Operand.FPROP_WEIGHT, torch.zeros_like)


@pytest.mark.parametrize("part", [Mixed, Further])
def test_inherited_methods_act(part: type[Part]) -> None:
    assert part.acted == {"block_statistic"}
    x = torch.randn(8, 64)
    larger = technique("larger", parts=lambda self, site: (part(options=self, operands=FPROP),))
    hook = technique("hook", parts=lambda self, site: (OptimizerHook(options=self, operands=FPROP),))
    assert not torch.equal(applied(larger)(x), applied(hook)(x))


def test_a_class_of_two_kinds_is_refused() -> None:
    with pytest.raises(TypeError, match="Both is a BlockScale and a Rounding; make a part of each"):
        type("Both", (Mixed, Rounding), {"__module__": __name__})


@pytest.mark.parametrize("collection", [set, list, tuple])
def test_operands_may_be_any_collection_of_operands(collection: Any) -> None:
    made = technique("made", parts=lambda self, site: (Mixed(options=self, operands=collection(WEIGHT)),))
    (part,) = parts_of(made())
    assert part.operands == WEIGHT
    assert applied(made)(torch.randn(4, 64)).isfinite().all()


def test_state_that_a_part_lists_is_there_in_evaluation_when_the_part_is_not() -> None:
    class Reads(Rounding):
        mixes = "none"

        def round(self, ratio: Tensor, scale: Tensor, context: Any) -> Tensor:
            return ratio.round() + context.state["e"]

    def parts(self: Technique, site: Any) -> tuple[Part, ...]:
        return Noisy(options=self, operands=WEIGHT, state=(LIKE_WEIGHT,)), Reads(options=self, operands=WEIGHT)

    model, x = applied(technique("made", parts=parts)), torch.randn(4, 64)
    noisy = model(x)
    assert torch.equal(model.eval()(x), model(x))
    assert not torch.equal(model(x), noisy)


def test_state_has_the_layout_of_what_a_method_is_given() -> None:
    seen: dict[str, tuple[Any, Any]] = {}

    class Around(Wrapper):
        mixes = "none"

        def split(self, x: Tensor, context: Any) -> None:
            seen["split"] = tuple(x.shape), tuple(context.state["e"].shape)

    class Inside(Rounding):
        mixes = "none"

        def round(self, ratio: Tensor, scale: Tensor, context: Any) -> None:
            seen["round"] = tuple(ratio.shape), tuple(context.state["e"].shape)

    def parts(self: Technique, site: Any) -> tuple[Part, ...]:
        return Around(options=self, operands=WEIGHT, state=(LIKE_WEIGHT,)), Inside(options=self, operands=WEIGHT)

    applied(technique("made", parts=parts))(torch.randn(4, 64))
    assert seen == {"split": ((32, 64), (32, 64)), "round": ((32, 4, 16), (32, 4, 16))}


def test_each_part_may_observe_an_entry_of_its_own() -> None:
    entries = (counted("a"), counted("b"))

    def parts(self: Technique, site: Any) -> tuple[Part, ...]:
        return tuple(Counts(options=self, operands=WEIGHT, entry=each.name, state=(each,)) for each in entries)

    model = applied(technique("made", parts=parts))
    for _ in range(2):
        model(torch.randn(4, 64)).sum().backward()
    assert [value.item() for name, value in model.state_dict().items() if name.endswith(("_a", "_b"))] == [2, 2]


def test_an_entry_that_is_not_observed_is_an_error() -> None:
    both = (counted("a"), counted("b"))
    made = technique("made", parts=lambda self, site: (Counts(options=self, operands=WEIGHT, entry="a", state=both),))
    with pytest.raises(fp4graph.PluginError, match=r"observe: returned no values of \['b'\], which are due"):
        applied(made)(torch.randn(4, 64)).sum().backward()


def test_a_technique_may_refuse_experts_and_acts_elsewhere() -> None:
    def parts(self: Technique, site: Any) -> tuple[Part, ...]:
        if site.op == "grouped":
            raise ValueError("not for experts")
        return Mixed(options=self, operands=WEIGHT), OptimizerHook(options=self)

    made = technique("made", parts=parts)
    assert len(hooks_of(made())) == 1
    assert applied(made)(torch.randn(4, 64)).isfinite().all()
    registry = Registry([("made", Offers(made))], entry_point_group=None)
    rule = fp4graph.load_policy(one_rule("made", quantize=quantizer(16)), registry).rules[0]
    with pytest.raises(CaptureError, match="technique made: not for experts"):
        plan_site(SiteView("m", "grouped", 64, 32, 64 * 32), rule)


@pytest.mark.parametrize("element", ["fprop.input", "fprop.weight"])
def test_several_elements_are_refused_only_where_elements_are_rounded(element: str) -> None:
    def parts(self: Technique, site: Any) -> tuple[Part, ...]:
        return Rounds(options=self, operands=WEIGHT), Mixed(options=self, operands={Operand.FPROP_INPUT})

    registry = Registry([("made", Offers(technique("made", parts=parts)))], entry_point_group=None)
    data = one_rule("made", quantize=quantizer(16), operands={element: {"element": ["e2m1", "int4"]}})
    if element == "fprop.input":
        assert fp4graph.load_policy(data, registry).quantizes
    else:
        with pytest.raises(fp4graph.PolicyError, match=r"the blocks of fprop\.weight choose between"):
            fp4graph.load_policy(data, registry)
