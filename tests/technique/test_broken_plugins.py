"""A plugin that breaks the contract: the error names the plugin and the site, and other plugins still work."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.ops import contract
from fp4graph.technique import (
    TENSOR_STAGES,
    BlockScale,
    Operand,
    Operands,
    OptimizerHook,
    Overhead,
    PairTransform,
    Part,
    Rounding,
    StateEntry,
    Technique,
    Wrapper,
)
from fp4graph.technique.registry import Registry
from tests.helpers.models import Mlp
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.steps import descend
from tests.helpers.techniques import FPROP, FREE, Offers, technique
from tests.helpers.training import applied, prepared


def policy(used: str | list[str], *classes: type[Technique]) -> fp4graph.policy.Policy:
    """Return a policy that uses technique ``used``; each class comes from a plugin called ``NAME-plugin``."""
    registry = Registry([(f"{cls.name}-plugin", Offers(cls)) for cls in classes], entry_point_group=None)
    assert not registry.failures
    used = [used] if isinstance(used, str) else used
    return fp4graph.load_policy(one_rule(quantize=quantizer(), techniques=used), registry)


def broken(**members: Any) -> fp4graph.policy.Policy:
    """Return a policy that uses a technique with these members."""
    return policy("broken", technique("broken", **members), healthy())


def train(model: nn.Module, chosen: fp4graph.policy.Policy, backend: str = "eager") -> float:
    """Return the loss of one step: forward, backward, optimizer."""
    model = applied(model, chosen, backend=backend)
    x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
    (loss,) = descend(lambda: model(x).square().mean(), prepared(model, torch.optim.SGD, lr=0.1), 1)
    return loss


def raises(*args: Any) -> Any:
    raise ZeroDivisionError("a bug of the plugin")


BUG = "ZeroDivisionError: a bug of the plugin"
#: Members with which a technique normalizes, so that the gradients of groups are computed.
NORMALIZING: dict[str, Any] = {
    "normalizes": True,
    "group_granularity": "tensor",
    "group_scale": lambda self, z, group, c: group("tensor"),
    "statistic_gradient": lambda self, values, z, c: values.sign(),
    "scale_surrogate": lambda self, ideal, c: torch.ones_like(ideal),
    "group_gradient": lambda self, values, g, groups, c: values.sign(),
}
OBSERVED = StateEntry("mean", Operand.FPROP_WEIGHT, lambda w: w.new_zeros(()), writer="graph", weight_like=False)
#: Further members without which a stage is not called.
NEEDED: dict[str, dict[str, Any]] = {
    "observe": {"state": (OBSERVED,)},
    "inverse": {"element_surrogate": lambda self, u, c: u},
    **dict.fromkeys(("group_statistic", "statistic_gradient", "scale_surrogate", "group_gradient"), NORMALIZING),
}


def starting(init: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Return members that keep a state whose first value is ``init(weight)``."""
    return {"state": (StateEntry("mean", Operand.FPROP_WEIGHT, init),), "after_step": lambda self, update: None}


#: A stage, the fault (empty where the message says it), the method, and a part of the message.
WRONG = [
    ("block_statistic", "", lambda self, v, z, c: v, "returned shape (5, 2, 32) where (5, 2, 1) is due"),
    ("block_statistic", "a number", lambda self, v, z, c: 3, "returned int where a tensor is due"),
    ("block_statistic", "float64", lambda self, v, z, c: z.double(), "torch.float32 on cpu is due"),
    ("block_statistic", "whole numbers", lambda self, v, z, c: z.int(), "where floating point is due"),
    ("group_statistic", "", lambda self, v, g, groups, c: v, "returned shape (5, 2, 32) where (1, 1, 1) is due"),
    (
        "group_scale",
        "",
        lambda self, z, group, c: z.new_ones(7),
        "returned shape (7,), which does not broadcast to (5, 2, 1)",
    ),
    ("group_scale", "each", lambda self, z, group, c: z.new_ones(5, 2, 32), "does not broadcast to (5, 2, 1)"),
    ("group_scale", "its statistic", lambda self, z, group, c: (z.new_ones(()), z[0]), "shape (2, 1) where (5, 2, 1)"),
    ("group_scale", "3 things", lambda self, z, group, c: (z, z, z), "must return γ, (γ, statistic of x/γ) or None"),
    ("scale", "", lambda self, v, z, c: torch.cat([z, z]), "shape (10, 2, 1) where (5, 2, 1) is due"),
    ("round", "", lambda self, r, s, c: r.sum(-1), "returned shape (5, 2) where (5, 2, 32) is due"),
    ("rescale", "", lambda self, q, c: q.elements, "shape (5, 2, 32) where (5, 2, 1) is due"),
    ("split", "", lambda self, x, c: (torch.cat([x, x]), None), "shape (10, 48) where (5, 48) is due"),
    ("split", "the residual", lambda self, x, c: (x, x[:1]), "shape (1, 48) where (5, 48) is due"),
    ("split", "one tensor", lambda self, x, c: x, "must return (part to quantize, residual or None), or None"),
    ("around", "", lambda self, q, x, c: q(x)[:, :8], "returned shape (5, 8) where (5, 48) is due"),
    ("around", "what it quantizes", lambda self, q, x, c: q(x[:, :8]), "has shape (5, 8) where (5, 48) is due, or"),
    ("around", "one line", lambda self, q, x, c: q(x[0]), "has shape (48,) where (5, 48) is due, or 1 in place"),
    ("around", "elsewhere", lambda self, q, x, c: q(x.to("meta")), "is on meta, and the operand on cpu"),
    ("after", "", lambda self, x, c: x.mT, "returned shape (48, 5) where (5, 48) is due"),
    ("after", "float64", lambda self, x, c: x.double(), "returned torch.float64"),
    ("observe", "", lambda self, q, c: {"mean": q.elements}, "where () is due"),
    ("observe", "another name", lambda self, q, c: {"men": q.z.sum()}, "['men'] where values of ['mean']"),
    ("observe", "no mapping", lambda self, q, c: q.z.sum(), "returned Tensor where values of ['mean']"),
    ("pair_context", "", lambda self, a, b, c: 3, "must return a tuple of tensors, or None"),
    ("transform", "", lambda self, x, side, shared: x.mT, "shape (48, 5) where (5, ...) is due"),
    ("transform", "lengths", lambda self, x, side, shared: x[:, : 8 if side == "left" else 48], "axes of 8 and 48"),
    ("inverse", "", lambda self, x, side, shared: torch.cat([x, x]), "shape (10, 64) where (5, ...) is due"),
    ("inverse", "too short", lambda self, x, side, shared: x[:, :8], "a last axis of 8 where 64 is due"),
    ("element_surrogate", "", lambda self, u, c: u.sum(), "returned shape () where"),
    ("statistic_gradient", "", lambda self, v, z, c: z, "returned shape"),
    ("scale_surrogate", "", lambda self, s, c: s[0], "returned shape"),
    ("group_gradient", "", lambda self, v, g, groups, c: g, "returned shape (1, 1, 1) where"),
]
#: Faults that take several members: the fault, the members, the stage, and a part of the message.
WRONG_TOGETHER: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "other groups than declared",
        {"group_granularity": "row", "group_scale": lambda self, z, group, c: group("tensor")},
        "group_scale", "asked for groups of 'tensor'; its group_granularity is 'row'",
    ),
    (
        "more numbers than declared",
        {"group_granularity": "tensor", "group_scale": lambda self, z, group, c: z},
        "group_scale", "returned (5, 2, 1); its group_granularity is 'tensor'",
    ),
    ("a row", starting(lambda w: w[0]), "state 'mean'", "starts with shape (48,) where a tensor of shape (64, 48) is"),
    ("nothing", starting(lambda w: None), "state 'mean'", "starts with NoneType"),
]  # fmt: skip
#: Stages that torch.compile traces, so that the error comes while it compiles.
TRACED = (*PairTransform.stages, *TENSOR_STAGES)


def healthy() -> type[Technique]:
    return technique("healthy", block_statistic=lambda self, values, z, context: z * 0.5)


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A model; after the test, training it under another plugin's technique must give the loss of a fresh model."""
    model = Mlp(48, 64, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield model
    model.load_state_dict(before)
    assert train(model, policy("healthy", healthy())) == healthy_loss()


@cache
def healthy_loss() -> float:
    """Return the loss of a fresh model."""
    return train(Mlp(48, 64, 32), policy("healthy", healthy()))


def check(error: fp4graph.PluginError, stage: str, *, site: str | None = None) -> None:
    assert error.plugin == "broken-plugin"
    assert error.site in ([site] if site else ["first", "second", "first.weight"])
    assert str(error).startswith(f"plugin 'broken-plugin', at {error.site}: technique 'broken', {stage}")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("stage", TRACED)
def test_an_exception_while_the_model_is_compiled_is_named(stage: str, model: nn.Module) -> None:
    with pytest.raises(fp4graph.PluginError, match=f"{BUG}$") as caught:
        train(model, broken(**NEEDED.get(stage, {}) | {stage: raises}), backend="aot_eager")
    check(caught.value, stage)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    with pytest.raises(fp4graph.PluginError, match=BUG):  # the next call does not run in high precision
        model(torch.randn(5, 48))
    assert "_fp4graph" not in " ".join(fp4graph.remove(model).state_dict())


#: Stages that depend on the values of tensors, with the operation that the message names.
VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "item": ({"scale": lambda self, v, z, c: z * z.max().item()}, "_local_scalar_dense"),
    "if": ({"round": lambda self, r, s, c: r if (r > 0).any() else r * 2}, "_local_scalar_dense"),
    "float": ({"after": lambda self, x, c: x * float(x[0, 0])}, "_local_scalar_dense"),
    "tolist": ({"scale": lambda self, v, z, c: z * z.max().tolist()}, ""),
    "numpy": ({"scale": lambda self, v, z, c: z * float(z.max().numpy())}, ""),
    "mask": ({"block_statistic": lambda self, v, z, c: z + z[z > 0].sum()}, "index.Tensor"),
    "another shape": ({"scale": lambda self, v, z, c: z * z.max().item() if len(z) != 5 else z}, "_local_scalar"),
    "nonzero": ({"split": lambda self, x, c: (x + x.nonzero().sum() * 0, None)}, "nonzero"),
    "in the backward": ({"element_surrogate": lambda self, u, c: u * u.max().item()}, "_local_scalar_dense"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", VALUES)
def test_a_stage_that_reads_values_fails_under_eager_as_compiled(case: str, model: nn.Module) -> None:
    members, operation = VALUES[case]
    (stage,) = members
    for backend in ("eager", "aot_eager"):
        with pytest.raises(fp4graph.PluginError, match=f"{operation}.*depends on the values of a tensor") as caught:
            train(model, broken(**members), backend)
        check(caught.value, stage)


#: Stages that write into a tensor that they were given.
WRITES: dict[str, Callable[..., Any]] = {
    "split": lambda self, x, c: (x.mul_(2), None),
    "after": lambda self, x, c: x.add_(1),
    "block_statistic": lambda self, v, z, c: z + v.mul_(2).sum() * 0,
    "round": lambda self, r, s, c: r.round_(),
    "rescale": lambda self, q, c: q.scale.mul_(2),
    "transform": lambda self, x, side, shared: x.mul_(2 if side == "left" else 0.5),
    "element_surrogate": lambda self, u, c: u.clamp_(0, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", WRITES)
def test_a_stage_that_writes_into_its_arguments_is_named(stage: str, model: nn.Module) -> None:
    """It would double the weight, or the input, at every forward."""
    for backend in ("eager", "aot_eager"):
        with pytest.raises(fp4graph.PluginError, match="writes into a tensor that it was given") as caught:
            train(model, broken(**NEEDED.get(stage, {}) | {stage: WRITES[stage]}), backend)
        check(caught.value, stage)


@pytest.mark.slow
def test_a_stage_that_draws_from_torchs_generator_is_named(model: nn.Module) -> None:
    for backend in ("eager", "aot_eager"):
        with pytest.raises(fp4graph.PluginError, match=r"rand_like.*draws from torch's generator") as caught:
            train(model, broken(scale=lambda self, v, z, c: z * (1 + torch.rand_like(z))), backend)
        check(caught.value, "scale")


@pytest.mark.slow
def test_a_stage_may_write_into_tensors_of_its_own(model: nn.Module) -> None:
    fine = technique("fine", split=lambda self, x, c: (x.clone().mul_(2), None))
    assert math.isfinite(train(model, policy("fine", fine)))


@pytest.mark.slow
def test_a_stage_may_index_by_numbers(model: nn.Module) -> None:
    fine = technique("fine", scale=lambda self, v, z, c: z[torch.arange(z.shape[0])] * torch.where(z > 0, 1.0, 0.5))
    assert math.isfinite(train(model, policy("fine", fine)))


@pytest.mark.parametrize("stage", ["group_statistic", "group_gradient"])
def test_a_stage_on_statistics_of_groups_has_no_effect_without_a_technique_that_normalizes(stage: str) -> None:
    lone = technique("lone", **{stage: lambda self, values, g, groups, context: None})
    message = "'lone' has no effect here: it acts on statistics of groups, and no technique"
    with pytest.warns(PolicyWarning, match=message):
        policy("lone", lone)
    policy(["divides", "lone"], technique("divides", **NORMALIZING), lone)
    policy("plans", technique("plans", plan=lambda self, site, specs: specs, group_statistic=lambda *_: None))


def test_running_a_stage_keeps_no_part_alive() -> None:
    part = made_part(scale=lambda self, values, z, context: z)
    contract.run(part, "scale", torch.ones(1), torch.ones(1), None)
    alive = weakref.ref(part)
    del part
    gc.collect()
    assert alive() is None


def made_part(**members: Any) -> Part:
    """Return the first part of a technique with these members."""
    return technique("made", **members)().parts(None)[0]


@pytest.mark.inductor
@pytest.mark.compiler
def test_a_wrong_result_under_inductor_is_named(model: nn.Module) -> None:
    narrow = broken(round=lambda self, ratio, scale, context: ratio[..., :1])
    with pytest.raises(fp4graph.PluginError, match=r"returned shape \(5, 2, 1\) where \(5, 2, 32\) is due$") as caught:
        train(model, narrow, backend="inductor")
    check(caught.value, "round", site="first")


@pytest.mark.slow
def test_only_the_broken_one_of_two_techniques_is_named(model: nn.Module) -> None:
    outer = technique("outer", around=lambda self, quantize, x, context: quantize(x))
    with pytest.raises(fp4graph.PluginError) as caught:
        train(model, policy(["outer", "inner"], outer, technique("inner", round=raises)))
    assert (caught.value.plugin, caught.value.site) == ("inner-plugin", "first")


@pytest.mark.slow
def test_running_out_of_memory_is_not_blamed_on_a_plugin(model: nn.Module) -> None:
    def greedy(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(torch.OutOfMemoryError):
        train(model, broken(round=greedy))


# ------------------------------------------------------------------ planning


GARBAGE = {
    "no mapping": (42, "must return a mapping of operands to specs; got 42"),
    "empty": ({}, "wrong or missing: dgrad.grad_output, dgrad.weight, fprop.input"),
    "strangers": (dict.fromkeys([*Operand, "fprop.bias"]), "wrong or missing: fprop.bias"),
    "no specs": (dict.fromkeys(Operand, "e2m1"), "must return a QuantSpec or None for each operand; got 'e2m1'"),
}


@pytest.mark.parametrize("case", GARBAGE)
def test_a_plan_of_garbage_is_refused_when_the_policy_is_loaded(case: str) -> None:
    garbage, message = GARBAGE[case]
    with pytest.raises(fp4graph.PluginError, match=re.escape(message)) as caught:
        broken(plan=lambda self, site, specs: garbage)
    assert caught.value.plugin == "broken-plugin"


WEIGHT = Operand.FPROP_WEIGHT
#: Wrong results of ``parts``, with a part of the message.
WRONG_PARTS: dict[str, tuple[Callable[[Technique], Any], str]] = {
    "a list": (lambda t: [], "parts() must return a tuple of parts; got []"),
    "no part": (lambda t: ("round",), "parts() must return a tuple of parts; got ('round',)"),
    "operands": (lambda t: (Hook(options=t, operands={"fprop.bias"}),), "takes Operand members only; got 'fprop.bias'"),
    "GEMMs": (lambda t: (Turn(options=t, gemms={"fprop"}),), "takes Gemm members only; got 'fprop'"),
    "state": (lambda t: (Hook(options=t, state=("mean",)),), "takes StateEntry members only; got 'mean'"),
    "a lone operand": (lambda t: (Hook(options=t, operands=Operand.FPROP_INPUT),), "operands of Hook must be a set or"),
    "a list in a field": (lambda t: (Listing(options=t, numbers=[1]),), "fields of Listing must be hashable"),
    "mixes": (lambda t: (Doubling(options=t, mixes="blok"),), "Doubling declares mixes = 'blok'; choose from none"),
    "another hook": (lambda t: (Hook(options=t),), "hooks must not depend on the site: ['Hook'] here, [] at a"),
    "two entries of a name": (
        lambda t: (Hook(options=t, state=tuple(StateEntry("e", WEIGHT, init) for init in (torch.ones_like, raises))),),
        "two different entries of state are called 'e' at fprop.weight",
    ),
    "options": (lambda t: (Hook(options=technique("other")()),), "the options of Hook must be the technique itself"),
    "an exception": (raises, BUG),
}  # fmt: skip


class Hook(OptimizerHook):
    """Does nothing."""

    def before_step(self, update):
        pass


class Turn(PairTransform):
    """Does nothing."""

    mixes = "none"
    transform = inverse = lambda self, x, side, shared: x


class Listing(Rounding):
    """Has a field that may hold anything."""

    mixes = "none"
    numbers: Any

    def round(self, ratio, scale, context):
        return None


def late(member: str, make: Callable[..., Any]) -> dict[str, Any]:
    """Return a ``plan`` or ``parts`` that is correct while a policy is loaded, when it is checked at a site without a
    module, and that returns ``make(...)`` at the sites of a model."""
    if member == "plan":
        return {"plan": lambda self, site, specs: specs if site.module is None else make()}
    return {"parts": lambda self, site: () if site.module is None else make(self)}


INERT = pytest.mark.filterwarnings("ignore:technique .broken. has no effect here:fp4graph.errors.PolicyWarning")
#: The members of a broken technique, the stage and the site that the error names, and a part of the message.
BROKEN = [
    *(
        pytest.param(NEEDED.get(stage, {}) | {stage: method}, stage, None, message, id=f"{stage} {case}")
        for stage, case, method, message in (
            *WRONG, *((stage, "raises", raises, BUG) for stage in (*TRACED, "before_step", "after_step"))
        )
    ),
    *(
        pytest.param(members, stage, None, message, id=f"{stage} {case}")
        for case, members, stage, message in WRONG_TOGETHER
    ),
    *(
        pytest.param(late("plan", lambda plan=plan: plan), "planning: TypeError", "first", message, id=f"plan, {case}")
        for case, (plan, message) in GARBAGE.items()
    ),
    pytest.param(late("plan", raises), "planning", "first", BUG, id="plan raises"),
    *(
        pytest.param(late("parts", make), "planning", "first", message, id=f"parts, {case}", marks=INERT)
        for case, (make, message) in WRONG_PARTS.items()
    ),
]  # fmt: skip


@pytest.mark.usefixtures("operation_by_operation")
@pytest.mark.slow
@pytest.mark.parametrize(("members", "stage", "site", "message"), BROKEN)
def test_a_broken_member_is_named(
    members: dict[str, Any], stage: str, site: str | None, message: str, model: nn.Module
) -> None:
    with pytest.raises(fp4graph.PluginError) as caught:
        train(model, broken(**members))
    check(caught.value, stage, site=site)
    assert message in str(caught.value)
    assert isinstance(caught.value.__cause__, ZeroDivisionError) == (message == BUG)


@pytest.mark.slow
def test_a_refusal_while_planning_names_technique_and_site(model: nn.Module) -> None:
    def refuse() -> Any:
        raise ValueError("48 is no multiple of 32")

    with pytest.raises(fp4graph.CaptureError, match="technique broken: 48 is no multiple of 32") as caught:
        train(model, broken(**late("plan", refuse)))
    assert caught.value.site == "first"


@pytest.mark.slow
def test_a_technique_that_no_policy_uses_stops_no_policy(model: nn.Module) -> None:
    with pytest.warns(PolicyWarning, match="plugin 'broken-plugin': technique 'broken', implied_by: ZeroDivisionError"):
        chosen = policy("healthy", technique("broken", implied_by=classmethod(raises)), healthy())
    train(model, chosen)


def test_on_weight_beside_a_list_of_operands_is_refused_when_the_class_is_made() -> None:
    with pytest.raises(TypeError, match="Both acts on_weight, and its option operands lists operands; declare one"):

        class Both(Technique):
            on_weight: ClassVar[bool] = True
            operands: Operands = ("forward",)


#: Members that classes of techniques had in earlier versions.
FORMER: dict[str, Any] = {
    "round": lambda self, ratio, scale, context: ratio,
    "before_step": lambda self, update: None,
    "acts_on": lambda self, site: FPROP,
    "state": lambda self, site: (),
    "draws": property(lambda self: True),
    "mixes": "block",
    "by_block": True,
    "by_expert": True,
}


@pytest.mark.parametrize("former", FORMER)
def test_a_class_of_an_earlier_version_keeps_the_plugin_out(former: str) -> None:
    """The registry explains why; pydantic must not refuse the class before."""

    class Old(Technique):
        name: ClassVar[str] = "old"
        overhead: ClassVar[Overhead] = FREE
        complexity: ClassVar[float] = 0.0
        __annotations__[former] = ClassVar
        locals()[former] = FORMER[former]

    (error,) = map(str, Registry([("old", Offers(Old))], entry_point_group=None).failures.values())
    assert error.startswith(f"plugin 'old': Old has {former} itself, as in an earlier version; move it to a part that")
    assert error.endswith("see docs/techniques.md")


class Doubling(Wrapper):
    """A part that declares what it mixes."""

    mixes = "block"

    def after(self, x: Tensor, context: Any) -> Tensor:
        return x * 2


#: A kind of part, the members of a class of that kind, and why it is refused.
WRONG_CLASSES: dict[str, tuple[type[Part], dict[str, Any], str]] = {
    "no mixes": (Rounding, {"round": lambda self, r, s, c: r}, "has a method round and must declare what it mixes"),
    "mixes of its base": (Doubling, {"split": lambda self, x, c: None}, "Made has a method split and must declare"),
    "misspelt mixes": (Rounding, {"mixes": "blocks", "round": lambda self, r, s, c: r}, "none, block, expert, tensor"),
    "mixes nothing": (
        BlockScale,
        {"mixes": "none", "block_statistic": lambda self, v, z, c: v.amax().expand_as(z)},
        "mixes = 'none' and acts on whole blocks at block_statistic; declare 'block', 'expert' or 'tensor'",
    ),
    "a method of another kind": (
        BlockScale, {"mixes": "block", "round": lambda self, r, s, c: r},
        "Made is a BlockScale and has a method round, which belongs to: Rounding",
    ),
    "no inverse": (
        PairTransform, {"mixes": "none", "transform": lambda self, x, side, shared: x},
        "Made has no method inverse, which a PairTransform needs",
    ),
    "a property": (Rounding, {"draws": property(lambda self: True)}, "draws is a field; pass its value when"),
    "a method": (Rounding, {"state": lambda self: ()}, "state is a field; pass its value when the part is made"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_CLASSES)
def test_a_wrong_class_of_a_part_is_refused_when_it_is_defined(case: str) -> None:
    """The plugin then fails when it is loaded, and not at the first mixture of experts."""
    kind, members, message = WRONG_CLASSES[case]
    with pytest.raises(TypeError, match=re.escape(message)):
        type("Made", (kind,), {"__module__": __name__, **members})


def test_fields_of_a_part_get_defaults_with_and_without_an_annotation() -> None:
    class Drawing(Rounding):
        draws = True
        counts: bool = True

    assert Drawing(options=None) == Drawing(options=None, draws=True, counts=True)
    assert Drawing(options=None, draws=False) != Drawing(options=None)


# ------------------------------------------------------------------ the checks themselves


def test_a_normalizer_may_be_anything_that_broadcasts() -> None:
    like = torch.zeros(5, 2, 1)
    made = made_part(group_scale=lambda self, z, group, context: None)
    for shape in ((), (1,), (1, 1, 1), (2, 1), (5, 1, 1), (5, 2, 1)):
        value = torch.ones(shape)
        assert contract.broadcastable(made, "group_scale", value, like) is value


def test_a_technique_outside_any_registry_is_named_as_its_own_plugin() -> None:
    error = contract.broken(technique("loose")(), "round", "wrong")
    assert str(error) == "plugin 'loose': technique 'loose', round: wrong"
