"""From a site and the rule that matched it to the programs that replace it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from typing import TypeVar

from fp4graph.errors import CaptureError, PluginError
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.gemm import GemmProgram, MatmulProgram
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.state import StateSlot
from fp4graph.policy import Rule
from fp4graph.technique import OperandSpecs, StateEntry, Technique, checked_plan, overrides
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.site import SiteView

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens to one site: the operands' final specs, and the program (None where nothing is quantized)."""

    specs: tuple[tuple[Operand, QuantSpec | None], ...]
    program: MatmulProgram | None


#: Of a site that stays in high precision.
NOTHING = Plan(tuple((operand, None) for operand in Operand), None)


def plan_site(site: SiteView, rule: Rule, *, training: bool = True) -> Plan:
    """The plan for ``site`` under ``rule``, which must be a quantizing one.

    In evaluation (``training=False``) fprop rounds to nearest, and noise added after dequantization is off unless its
    technique ``draws_in_evaluation``.

    Raises:
        CaptureError: a technique's options do not fit the site.
    """
    specs: OperandSpecs = dict(rule.specs)
    for technique in rule.techniques:
        specs = _call(technique, site, rule, partial(checked_plan, technique, site, specs))
    techniques = rule.techniques
    if not training:
        specs = {operand: _settled(spec) if operand.gemm is Gemm.FPROP else spec for operand, spec in specs.items()}
        techniques = tuple(t for t in techniques if t.draws_in_evaluation or not (t.draws and overrides(t, "after")))
    ordered = tuple((operand, specs.get(operand)) for operand in Operand)
    if all(spec is None for _, spec in ordered):
        return Plan(ordered, None)

    acts_on = {t: _members(t, site, rule, "acts_on", Operand) for t in techniques}
    pairs = {t: _members(t, site, rule, "pairs", Gemm) for t in techniques}
    slots = tuple(
        StateSlot(t.name, entry)
        for t in techniques
        if site.op == "linear"
        for entry in _members(t, site, rule, "state", StateEntry)
        if specs.get(entry.operand) is not None
    )

    def operand(which: Operand) -> OperandProgram:
        spec = specs.get(which)
        return OperandProgram(
            spec,
            tuple(t for t in techniques if spec is not None and which in acts_on[t]),
            tuple(slot for slot in slots if slot.entry.operand is which),
            reuses=spec is None and which in rule.reuses,
        )

    def gemm(which: Gemm, left: Operand, right: Operand) -> GemmProgram:
        quantized = specs.get(left) is not None or specs.get(right) is not None
        return GemmProgram(
            which, operand(left), operand(right), tuple(t for t in techniques if quantized and which in pairs[t])
        )

    return Plan(
        ordered,
        MatmulProgram(
            fprop=gemm(Gemm.FPROP, Operand.FPROP_INPUT, Operand.FPROP_WEIGHT),
            dgrad=gemm(Gemm.DGRAD, Operand.DGRAD_GRAD_OUTPUT, Operand.DGRAD_WEIGHT),
            wgrad=gemm(Gemm.WGRAD, Operand.WGRAD_GRAD_OUTPUT, Operand.WGRAD_INPUT),
            state=slots,
        ),
    )


@lru_cache(maxsize=4096)
def plan_weight(site: SiteView, rule: Rule) -> Plan:
    """:func:`plan_site` for a weight known before any capture; the optimizer's view of the site."""
    return plan_site(site, rule)


def _settled(spec: QuantSpec | None) -> QuantSpec | None:
    """``spec`` without forward noise."""
    if spec is None or not spec.needs_key:
        return spec
    scale = spec.scale
    if scale.rounding == "stochastic":
        scale = dataclasses.replace(scale, rounding="nearest_even")
    return dataclasses.replace(spec, rounding="nearest", scale=scale)


def _members(technique: Technique, site: SiteView, rule: Rule, method: str, kind: type[T]) -> tuple[T, ...]:
    """What a planning method lists, each of ``kind``."""

    def listed() -> tuple[T, ...]:
        members = tuple(getattr(technique, method)(site))
        wrong = next((member for member in members if not isinstance(member, kind)), None)
        if wrong is not None:
            raise TypeError(f"{method}() must return {kind.__name__} members only; got {wrong!r}")
        return members

    return _call(technique, site, rule, listed)


def _call(technique: Technique, site: SiteView, rule: Rule, method: Callable[[], T]) -> T:
    """One planning method of a technique, its refusals as errors that name the site and the rule."""
    place = f"{rule.file}:{rule.line}: " if rule.file else ""
    try:
        return method()
    except ValueError as error:
        raise CaptureError(f"{place}technique {technique.name}: {error}", site=str(site)) from error
    except Exception as error:  # a stranger's bug, named
        raise PluginError(
            f"technique {technique.name!r}, planning: {type(error).__name__}: {error}",
            plugin=technique.plugin or technique.name,
            site=str(site),
        ) from error
