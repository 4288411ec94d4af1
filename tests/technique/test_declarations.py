"""Declarations of plugins that contradict the contract: each is an error before anything trains, with its remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from pydantic import Field, model_validator
from torch import nn

import fp4graph
from fp4graph.numerics.formats import E2M1
from fp4graph.technique import (
    BlockScale,
    ChannelSplit,
    Gradient,
    Operand,
    Operands,
    OptimizerHook,
    Overhead,
    PairTransform,
    Part,
    Partition,
    Rounding,
    StateEntry,
    Technique,
    parts_of,
)
from fp4graph.technique.registry import Registry
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.techniques import FPROP, FREE, Offers, technique
from tests.helpers.training import prepared

WEIGHT, INPUT, OUTPUT = Operand.FPROP_WEIGHT, Operand.FPROP_INPUT, Operand.DGRAD_GRAD_OUTPUT
X = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))


def scalar(weight: torch.Tensor) -> torch.Tensor:
    return weight.new_zeros(())


def with_option(kind: Any, value: Any) -> type[Technique]:
    """Return a technique with an option ``chosen``."""
    named = {"name": ClassVar[str], "overhead": ClassVar[Any], "chosen": kind}
    return technique("t", __annotations__=named, chosen=value)


#: Wrong declarations of a technique, with a part of the message.
WRONG_TECHNIQUES = {
    "a dot in the name": (technique("my.t"), "name 'my.t' must be a word"),
    "a number as name": (technique("t", name=3), "name 3 must be a word"),
    "cost": (
        technique("t", overhead=("O(n)", "O(1)", True)),
        "overhead must be an Overhead; got ('O(n)', ",
    ),
    "a conflict": (
        technique("t", conflicts="hadamard"),
        "conflicts must be a set of names, as frozenset({",
    ),
    "requirement": (technique("t", requires="hadamard"), "requires must be a set of names, as frozenset({'hadamard'})"),
    "default": (
        with_option(float, Field(-1.0, gt=0)),
        "default of option chosen: Input should be greater than 0; got",
    ),
    "operands": (with_option(Operands, ("foward",)), "default of option chosen: Value error, unknown operand 'foward'"),
    "no comma": (with_option(Operands, "forward"), "default of option chosen: Input should be a valid tuple"),
}


@pytest.mark.parametrize("case", WRONG_TECHNIQUES)
def test_a_wrong_declaration_keeps_the_plugin_out(case: str) -> None:
    wrong, message = WRONG_TECHNIQUES[case]
    registry = Registry([("p", Offers(wrong))], entry_point_group=None)
    assert message in str(registry.failures["p"])


def test_defaults_are_validated_as_options_are() -> None:
    assert with_option(tuple[float, ...], [1, 2])().chosen == (1.0, 2.0)  # type: ignore[attr-defined]
    required = with_option(float, Field(gt=0))
    assert not Registry([("p", Offers(required))], entry_point_group=None).failures


class Between(Technique):
    """Has options that a policy must give, though they have defaults."""

    name: ClassVar[str] = "between"
    overhead: ClassVar[Overhead] = FREE
    complexity: ClassVar[float] = 0.0
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Between:
        assert self.low < self.high  # type: ignore[operator]
        return self


@pytest.mark.filterwarnings("ignore:technique .between. has no effect here")
def test_a_validator_that_needs_the_options_of_a_policy_keeps_no_plugin_out() -> None:
    registry = Registry([("p", Offers(Between))])
    fp4graph.load_policy(one_rule({"between": {"low": 1, "high": 2}}), registry)
    with pytest.raises(fp4graph.PluginError, match="options of technique 'between': TypeError: '<' not") as caught:
        fp4graph.load_policy(one_rule("between"), registry)
    assert caught.value.plugin == "p"


@pytest.mark.filterwarnings("ignore:Field name")
@pytest.mark.parametrize("member", ["complexity", "on_weight", "conflicts", "plan", "check", "name"])
def test_an_option_with_the_name_of_a_member_is_refused_when_the_class_is_made(member: str) -> None:
    """A declaration without ClassVar would be an option, which policies could change."""
    with pytest.raises(TypeError, match=f"has an option {member}, which is a member of every technique; declare it as"):
        type("Shadowing", (Technique,), {"__module__": __name__, "__annotations__": {member: Any}, member: None})


#: Wrong entries of state, with a part of the message.
WRONG_ENTRIES: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "name": (("e.x", WEIGHT, scalar), {}, "state 'e.x': the name must be a Python identifier"),
    "operand": (("e", "fprop.weight", scalar), {}, "operand must be an Operand; got 'fprop.weight'"),
    "init": (("e", WEIGHT, 0.0), {}, "init must be a function of the weight"),
    "writer": (("e", WEIGHT, scalar), {"writer": "graf"}, "writer must be one of optimizer, graph, siblings"),
    "an activation": (("e", INPUT, torch.zeros_like), {}, "give weight_like=False beside an activation"),
    "canonical": (("e", WEIGHT, scalar), {"weight_like": False, "canonical": True}, "canonical needs weight_like=True"),
}


@pytest.mark.parametrize("case", WRONG_ENTRIES)
def test_a_wrong_entry_of_state_is_refused_when_it_is_made(case: str) -> None:
    arguments, more, message = WRONG_ENTRIES[case]
    with pytest.raises(TypeError, match=re.escape(message)):
        StateEntry(*arguments, **more)


@pytest.mark.parametrize("specs", [(("fprop.wieght", None),), ((WEIGHT, E2M1),), ((WEIGHT,),), None])
def test_a_partition_of_other_specs_is_refused_when_it_is_made(specs: Any) -> None:
    with pytest.raises(TypeError, match="specs must be pairs"):
        Partition("e", 4, specs)
    with pytest.raises(TypeError, match=r"count must be a whole number of channels; got 4\.5"):
        Partition("e", 4.5, ())  # type: ignore[arg-type]


def of(kind: type[Part], **members: Any) -> Any:
    """Return a class of that kind."""
    return type("Made", (kind,), {"__module__": __name__, "mixes": "block", **members})


Slope = of(Gradient, element_surrogate=lambda self, ratio, context: ratio)
Turn = of(PairTransform, transform=lambda self, x, side, shared: x, inverse=lambda self, x, side, shared: x)
Gamma = of(BlockScale, group_scale=lambda self, z, group, context: group("tensor"))
Larger = of(BlockScale, block_statistic=lambda self, values, z, context: z)
Sees = of(Part, observe=lambda self, quantization, context: {"e": context.state["e"]})
Short = of(BlockScale, rescale=lambda self, quantization: None)
ENTRY = {writer: StateEntry("e", WEIGHT, scalar, writer, False) for writer in ("optimizer", "graph")}
#: A class of parts, the fields of a part, and a part of the message.
WRONG_PARTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "gradient": (
        Slope,
        {"operands": {OUTPUT}},
        "has the operand dgrad.grad_output, and a Gradient acts on",
    ),
    "pair": (Turn, {"operands": FPROP}, "has the operand fprop.input, and a PairTransform takes no operands"),
    "arguments": (Short, {}, "Made.rescale must take (quantization, context)"),
    "granularity": (
        Gamma,
        {"group_granularity": "rows"},
        "has group_granularity 'rows'; choose 'tensor', 'all'",
    ),
    "no granularity": (
        Gamma,
        {"normalizes": True},
        "normalizes, and lacks a method group_scale or the",
    ),
    "no γ": (Larger, {"normalizes": True, "group_granularity": "row"}, "normalizes, and lacks a method group_scale"),
    "no entry": (Sees, {}, "Made observes, and no entry of state has writer='graph'"),
    "another writer": (
        Sees,
        {"state": (ENTRY["optimizer"],)},
        "Made observes, and no entry of state has writer='graph'",
    ),
    "no observer": (Larger, {"state": (ENTRY["graph"],)}, "entry 'e' of fprop.weight has writer='graph', and no part"),
    "another operand": (Sees, {"operands": {INPUT}, "state": (ENTRY["graph"],)}, "and no part observes that operand"),
}


def offered(*parts: Callable[[Technique], Part], **policy: Any) -> fp4graph.policy.Policy:
    """Return a policy with a technique of these parts."""
    cls = technique("t", parts=lambda self, site: tuple(part(self) for part in parts))
    return fp4graph.load_policy(one_rule("t", quantize=NVFP4, **policy), Registry([("p", Offers(cls))]))


@pytest.mark.parametrize("case", WRONG_PARTS)
def test_a_wrong_part_is_refused_when_a_policy_is_loaded(case: str) -> None:
    kind, given, message = WRONG_PARTS[case]
    with pytest.raises(fp4graph.PluginError, match=re.escape(message)) as caught:
        offered(lambda t: kind(options=t, **{"operands": FPROP} | given))
    assert caught.value.plugin == "p"


def test_a_kind_acts_on_those_of_the_listed_operands_at_which_it_can() -> None:
    parts = {"parts": lambda self, site: (Slope(options=self), Turn(options=self), Larger(options=self))}
    named = {"name": ClassVar[str], "overhead": ClassVar[Any], "listed": Operands}
    listing = technique("t", __annotations__=named, listed=("forward", "backward"), **parts)
    assert [part.operands for part in parts_of(listing())] == [FPROP, frozenset(), frozenset(Operand)]


@pytest.mark.parametrize("field", ["key", "name", "kind", "stages", "scale"])
def test_a_field_with_the_name_of_a_member_is_refused_when_the_class_is_made(field: str) -> None:
    with pytest.raises(TypeError, match=f"Made has a field {field}, which is a member of parts; rename the field"):
        of(Rounding, __annotations__={field: Any})


def test_a_check_that_returns_its_reason_is_refused() -> None:
    told = technique("t", block_statistic=lambda self, v, z, c: z, check=lambda self, specs, techniques: "does not fit")
    with pytest.raises(fp4graph.PluginError, match=r"check\(\) must raise ValueError or return None; got"):
        fp4graph.load_policy(one_rule("t"), Registry([("p", Offers(told))]))


# ------------------------------------------------------------------ faults that only a model shows


def trained(policy: fp4graph.policy.Policy) -> nn.Module:
    """Return a layer after one step."""
    torch.manual_seed(0)
    model = fp4graph.apply(nn.Sequential(nn.Linear(64, 32)), policy, backend="eager")
    optimizer = prepared(model, torch.optim.SGD, lr=0.1)
    model(X).square().mean().backward()
    optimizer.step()
    return model


Reads = of(Rounding, round=lambda self, ratio, scale, context: None)


@pytest.mark.parametrize("init", [lambda weight: weight, lambda weight: weight[1]])
def test_an_entry_that_begins_as_the_weight_is_a_copy_of_it(init: Any) -> None:
    """Else a technique that writes its entry would write the weight."""
    entry = StateEntry("e", WEIGHT, init, weight_like=False)
    doubles = of(OptimizerHook, after_step=lambda self, update: update.state["e"].mul_(2))
    acts = [lambda t: Reads(options=t, operands={WEIGHT}, state=(entry,)), lambda t: doubles(options=t)]
    weights = [trained(offered(*parts))[0].weight for parts in (acts, acts[:1])]
    assert torch.equal(*weights)


@pytest.mark.parametrize("name", ["e", "another"])
def test_a_hook_that_assigns_an_entry_is_refused(name: str) -> None:
    sets = of(OptimizerHook, after_step=lambda self, update: update.state.update({name: update.state["e"] + 1}))
    acts = [lambda t: Reads(options=t, operands={WEIGHT}, state=(ENTRY["optimizer"],)), lambda t: sets(options=t)]
    message = rf"assigned state\['{name}'\], and only entries that are written in place, as by copy_\(\), are kept"
    with pytest.raises(fp4graph.PluginError, match=message):
        trained(offered(*acts))


def test_two_techniques_never_share_a_buffer() -> None:
    entries = {"a": StateEntry("b_e", WEIGHT, scalar, weight_like=False), "a_b": ENTRY["optimizer"]}
    kept = [technique(name, state=(e,), round=lambda self, r, s, c: None) for name, e in entries.items()]
    policy = fp4graph.load_policy(one_rule(*entries), Registry([(cls.name, Offers(cls)) for cls in kept]))
    with pytest.raises(fp4graph.CaptureError, match="'b_e' of technique a and entry 'e' of a_b would share a"):
        fp4graph.apply(nn.Sequential(nn.Linear(64, 32)), policy)


@pytest.mark.filterwarnings("ignore:technique .t. has no effect here")
def test_a_partition_names_an_entry_of_the_weight() -> None:
    split = of(ChannelSplit, partition=lambda self, specs: Partition("norms", 4, ()))
    with pytest.raises(fp4graph.PluginError, match=r"names entry 'norms', which fprop\.weight lacks") as caught:
        trained(offered(lambda t: split(options=t)))
    assert caught.value.site == "0"


#: Parts whose methods return what no shape shows to be wrong, with a part of the message.
WRONG_RESULTS = {
    "fp16": (of(PairTransform, transform=lambda s, x, *_: x.half(), inverse=lambda s, x, *_: x), {}, "float16 on cpu"),
    "groups": (of(BlockScale, group_scale=lambda s, z, group, c: group(24)), {}, "are not made of whole blocks of 16"),
    "device": (of(BlockScale, group_scale=lambda s, z, g, c: z.to("meta")), {}, "float32 on meta where"),
    "no g": (
        of(BlockScale, group_scale=lambda s, z, group, c: z.amax()),
        {"normalizes": True, "group_granularity": "tensor"},
        "group_scale: normalizes, and asked group() for no g",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_RESULTS)
def test_a_wrong_result_is_named(case: str) -> None:
    kind, given, message = WRONG_RESULTS[case]
    with pytest.raises(fp4graph.PluginError, match=re.escape(message)) as caught:
        trained(offered(lambda t: kind(options=t, operands=FPROP & kind.among, **given)))
    assert (caught.value.plugin, caught.value.site) == ("p", "0")


def test_a_pair_transform_may_return_bf16_as_hardware_does() -> None:
    """The product and its gradients keep the model's dtype."""
    cast = [lambda s, x, *_: x.bfloat16(), lambda s, x, *_: x.bfloat16().float()]
    turns = [of(PairTransform, transform=each, inverse=each) for each in cast]
    models = [trained(offered(lambda t, kind=kind: kind(options=t))) for kind in turns]
    assert all(map(torch.equal, *(model.parameters() for model in models)))
