"""Decides about found matrix work: the rule, the plan, and the site that is reported.

The second pass of :mod:`fp4graph.graph.rewrite`. :func:`plan_site` plans one site under one rule; :class:`Planner` asks
the policy about the work of whole graphs.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from torch import SymInt

from fp4graph.errors import CaptureError, PluginError
from fp4graph.graph import flops, refusals
from fp4graph.graph.found import FoundProduct, FoundWork
from fp4graph.graph.operations import Verdict
from fp4graph.graph.products import Product, name_of, shown_part, transposes, value_of
from fp4graph.graph.refusals import COMPUTED_INSIDE, rule_that_keeps
from fp4graph.graph.site import Site, WeightUse
from fp4graph.kernels.machine import Machine
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops import contract
from fp4graph.ops.gemm import Apart, GemmProgram, MatmulProgram
from fp4graph.ops.lower import lower
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.schedule import Schedule, Setting
from fp4graph.ops.state import StateSlot
from fp4graph.policy import DEFAULT_INDEX, Decision, Policy, Rule, plan_specs
from fp4graph.policy.rule import checked_plan
from fp4graph.policy.techniques import require_one_element
from fp4graph.technique import (
    ChannelSplit,
    OperandSpecs,
    PairTransform,
    Part,
    Partition,
    Technique,
    Wrapper,
    parts_of,
)
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.site import SiteView

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Plan:
    """The decision about one site: the final spec of each operand (None for high precision), and the program that
    replaces the product (None where nothing is quantized)."""

    specs: tuple[tuple[Operand, QuantSpec | None], ...]
    program: MatmulProgram | None


_SHORT = 32  # elements of the short blocks into which a block is cut that would reach into several experts
#: The plan of a site that stays in high precision.
NOTHING = Plan(tuple((operand, None) for operand in Operand), None)


def plan_site(site: SiteView, rule: Rule, *, training: bool = True) -> Plan:
    """Plan ``site`` under ``rule``, which must be one that quantizes.

    In evaluation (``training=False``) fprop rounds to nearest, and a technique that adds noise after dequantization
    does nothing unless it ``draws_in_evaluation``.

    Raises:
        CaptureError: a technique's options do not fit the site.
    """
    return _Planning(site, rule, training).plan()


#: :func:`plan_site` with a cache.
plan_once = lru_cache(maxsize=4096)(plan_site)


@dataclasses.dataclass(frozen=True)
class _Planning:
    """The planning of a site. It asks the techniques; their errors name technique, site and rule."""

    site: SiteView
    rule: Rule
    training: bool

    def plan(self) -> Plan:
        """Return the plan; raise the errors of :func:`plan_site`."""
        site, rule = self.site, self.rule
        specs = plan_specs(rule.techniques, site, dict(rule.specs), self._specs)
        for technique in rule.techniques:  # at load this is asked of the sites that are sure to be there
            self._call(technique, partial(require_one_element, technique, site, specs))
        declared = parts = self._parts(site)
        if not self.training:
            specs = {operand: self._settled(spec, operand.gemm) for operand, spec in specs.items()}
            parts = tuple(part for part in parts if not _is_idle_in_evaluation(part))
            names = {part.name for part in parts}
            declared = tuple(part for part in declared if part.name in names)  # other parts read an idle part's state
        ordered = tuple((operand, specs.get(operand)) for operand in Operand)
        if site.op == "grouped":
            refusals.require_experts_apart(site, rule, parts)
        if all(spec is None for _, spec in ordered):
            return Plan(ordered, None)
        if site.op == "conv":
            at_linear = self._parts(dataclasses.replace(site, op="linear"))
            steps = ("before_step", "after_step")
            by_rule = (part for part in at_linear if not part.options.per_model)
            keeping = (part for part in by_rule if part.state or any(map(part.acts_at, steps)))
            refusals.require_no_weight_techniques(site, rule, keeping)
        entries = ((part.name, entry) for part in declared if site.multiplies_weight for entry in part.state)
        needed = (StateSlot(name, entry) for name, entry in entries if specs.get(entry.operand) is not None)
        slots = tuple(dict.fromkeys(needed))

        def operand_program(operand: Operand) -> OperandProgram:
            spec = specs.get(operand)
            program = OperandProgram(
                spec,
                tuple(part for part in parts if spec is not None and operand in (part.operands or ())),
                tuple(slot for slot in slots if slot.entry.operand is operand),
                reuses=spec is None and operand in rule.reuses,
            )
            return self._of_each_expert(program, operand) if site.op == "grouped" else program

        def gemm_program(gemm: Gemm) -> GemmProgram:
            quantized = any(specs.get(each) is not None for each in gemm.operands)
            pairs = (part for part in parts if isinstance(part, PairTransform))
            transforms = tuple(part for part in pairs if quantized and gemm in part.gemms)
            left, right = map(operand_program, gemm.operands)
            return GemmProgram(gemm, left, right, transforms)

        program = MatmulProgram(gemm_program(Gemm.FPROP), gemm_program(Gemm.DGRAD), gemm_program(Gemm.WGRAD), slots)
        refusals.require_unchanged_siblings(program, site, rule)
        splits = (part for part in parts if isinstance(part, ChannelSplit))
        chosen = {split: partition for split in splits if (partition := self._partition(split, specs)) is not None}
        if chosen:
            split = refusals.require_alone(program, list(chosen), site, rule)
            with contract.at(str(site)):
                program = self._with_partition(program, split, chosen[split])
        return Plan(ordered, program)

    def _specs(self, technique: Technique, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        return self._call(technique, partial(checked_plan, technique, site, specs))

    def _settled(self, spec: QuantSpec | None, gemm: Gemm) -> QuantSpec | None:
        """Return an operand's ``spec``; in evaluation without stochastic rounding, if the operand is one of fprop."""
        if self.training or gemm is not Gemm.FPROP or spec is None or not spec.needs_key:
            return spec
        scale = spec.scale
        if scale.rounding == "stochastic":
            scale = dataclasses.replace(scale, rounding="nearest_even")
        return dataclasses.replace(spec, rounding="nearest", scale=scale)

    def _parts(self, site: SiteView) -> tuple[Part, ...]:
        """Return the parts of the rule's techniques at ``site``, in the policy's order."""
        return tuple(part for t in self.rule.techniques for part in self._call(t, partial(parts_of, t, site)))

    def _partition(self, split: ChannelSplit, specs: OperandSpecs) -> Partition | None:
        """Return the channels that ``split`` has multiplied apart."""

        def checked() -> Partition | None:
            partition, channels = split.partition(specs), self.site.in_features
            if not isinstance(partition, Partition | None):
                raise TypeError(f"partition() must return a Partition or None; got {partition!r}")
            if partition is not None and channels is not None and not 0 < partition.count < channels:
                raise ValueError(f"{partition.count} of {channels} input channels cannot be multiplied apart")
            return partition

        return self._call(split, checked)

    def _with_partition(self, program: MatmulProgram, split: ChannelSplit, partition: Partition) -> MatmulProgram:
        """Return ``program`` with the channels that ``split`` has chosen multiplied apart."""
        specs = dict(partition.specs)

        def part(gemm: GemmProgram) -> GemmProgram:
            left, right = (self._settled(specs.get(operand), gemm.gemm) for operand in gemm.operands)
            reuses = right is None and gemm.operands[1] in self.rule.reuses
            return GemmProgram(gemm.gemm, OperandProgram(left), OperandProgram(right, reuses=reuses))

        labels, label = [(slot.technique, slot.label) for slot in program.state], (split.name, partition.entry)
        if label not in labels:
            raise contract.broken(split, "partition", f"names entry {label[1]!r}, which fprop.weight lacks")
        chosen = MatmulProgram(part(program.fprop), program.dgrad, part(program.wgrad))
        apart = Apart(labels.index(label), partition.count, chosen)
        return dataclasses.replace(program, apart=apart)

    def _of_each_expert(self, program: OperandProgram, operand: Operand) -> OperandProgram:
        """Return ``program`` with one scale for each expert, or for each line of an expert, where the policy's blocks
        would reach from one expert into the next.

        Such a block is cut into short blocks within one expert each; those of an expert, or its line, share a scale.
        """
        refusals.require_each_expert(program, operand, self.site, self.rule)
        spec = program.spec
        if spec is None or isinstance(spec.block, int | tuple) or not refusals.reaches_across(program, operand):
            return program
        return dataclasses.replace(program, spec=dataclasses.replace(spec, block=_SHORT), shares=spec.block)

    def _call(self, technique: Technique | Part, method: Callable[[], T]) -> T:
        place = f"{self.rule.file}:{self.rule.line}: " if self.rule.file else ""
        try:
            return method()
        except ValueError as error:
            raise CaptureError(f"{place}technique {technique.name}: {error}", site=str(self.site)) from error
        except Exception as error:  # a bug of the technique
            raise PluginError(
                f"technique {technique.name!r}, planning: {type(error).__name__}: {error}",
                plugin=technique.plugin or technique.name,
                site=str(self.site),
            ) from error


def _is_idle_in_evaluation(part: Part) -> bool:
    """Return whether a part adds noise after dequantization, which only training does."""
    return isinstance(part, Wrapper) and part.draws and part.acts_at("after") and not part.draws_in_evaluation


@dataclasses.dataclass(frozen=True)
class PlannedSite:
    """A site to be quantized: its product, its plan, and its :attr:`Site.occurrence`."""

    found: FoundProduct
    plan: Plan
    occurrence: int


class Planner:
    """Asks one policy about the matrix work of captured graphs.

    Args:
        first_occurrence: number of sites of each module that earlier graphs of the model held. A graph break may split
            a module's calls over several graphs, and their noise must not repeat.

    Attributes:
        sites: every place of matrix work, with the decision.
        uses: the products whose second factor is a parameter with a known owner.
        refused: the first error about matrix work that would otherwise silently run unquantized, or None.
    """

    def __init__(self, policy: Policy, first_occurrence: Mapping[str, int] | None = None) -> None:
        self.sites: list[Site] = []
        self.uses: list[WeightUse] = []
        self.refused: CaptureError | None = None
        self._policy = policy
        self._occurrences: Counter[str] = Counter(first_occurrence or {})

    @property
    def occurrences(self) -> dict[str, int]:
        """The number of sites of each module so far."""
        return dict(self._occurrences)

    def plan(self, work: Iterable[FoundProduct | FoundWork]) -> list[PlannedSite]:
        """Decide about ``work``, and return the sites that are to be quantized."""
        planned: list[PlannedSite] = []
        for found in work:
            if isinstance(found, FoundWork):
                self._work(found)
            elif (site := self._product(found)) is not None:
                planned.append(site)
        return planned

    def _product(self, found: FoundProduct) -> PlannedSite | None:
        decision = self._policy.decide(found.view, found.places)
        rule, index, view, node = decision.rule, decision.index, found.view, found.product.node
        if self._policy.quantizes and found.newcomer is not None:
            added = FoundWork(node, found.newcomer, dataclasses.replace(view, op=name_of(node)))
            self._keep(added, "its module was added after fp4graph.apply()")
            late = (
                "this module was added to the model after fp4graph.apply(), which has not planned it; call "
                "fp4graph.apply(model, policy) again, which keeps state where it fits, and prepare_optimizer again"
            )
            self._refuse(COMPUTED_INSIDE if ".parametrizations." in found.newcomer else late, found.newcomer)
            return None
        occurrence = self._occurrences[str(view.module)]
        self._occurrences[str(view.module)] += 1
        weight = None
        if found.has_weight and found.owner is not None:
            transposed = found.product.by_columns != transposes(found.views)
            part = shown_part(found.views, found.product.b, found.product.by_columns, transposed)
            self.uses.append(use := WeightUse(*found.owner, view, decision, transposed, part, found.product.autocast))
            weight = use.parameter, part
        plan = NOTHING
        if rule.quantizes:
            plan = plan_once(view, rule, training=found.marked is None or found.marked.marker.training)
        quantized = plan.program is not None
        state = () if plan.program is None else plan.program.state
        unlike_weight = [slot.technique for slot in state if not slot.entry.weight_like]
        if unlike_weight and _is_one_of_a_stack(found):
            self._refuse(
                f"technique {unlike_weight[0]} keeps one state for the parameter, a stack of matrices, and this "
                "product multiplies with one of them. Write it as a grouped product, in transformers with "
                f"experts_implementation='grouped_mm', or {rule_that_keeps(view.op, view.module)}",
                view.module,
            )
        shapes, forward_flops = tuple(map(_shape, found.product.shapes)), flops.of_product(found.product)
        name = rule.name if index != DEFAULT_INDEX or rule.quantizes else None
        reason = "" if quantized else rule.keep or "every operand is kept in high precision"
        facts = (shapes, name, reason, dict(plan.specs), quantized, occurrence, index, forward_flops)
        exact, apart = _exact(plan.program, view.op), None if plan.program is None else plan.program.apart
        count, specs = (0, {}) if apart is None else (apart.count, _apart_specs(apart))
        lowered = None if plan.program is None else _lowered(found.product, plan.program)
        more: dict[str, Any] = {"exact": exact, "apart_channels": count, "apart": specs}
        more["techniques"] = tuple(technique.name for technique in rule.techniques) if quantized else ()
        site = Site(view.module, view.op, *facts, **more, weight=weight, program=plan.program, lowered=lowered)
        self.sites.append(site)
        return PlannedSite(found, plan, occurrence) if quantized else None

    def _work(self, found: FoundWork) -> None:
        """Keep work that cannot be quantized, or refuse it, by its verdict; an explicit rule may keep work that is
        refused otherwise."""
        if found.verdict is Verdict.KEEP:
            return self._keep(found, found.reason)
        decision = self._policy.decide(found.view, found.places)
        unknown = found.verdict is Verdict.UNKNOWN
        instead = (dataclasses.replace(found.view, op=op) for op in found.verdict.value)
        wanted = self._policy.quantizes if unknown else any(self._policy.may_quantize(s, found.places) for s in instead)
        if not wanted or (decision.index >= 0 and not decision.rule.quantizes):
            return self._keep(found, decision.rule.keep or "", decision)
        self._keep(found, f"not supported: {found.reason}")
        op, module = found.view.op, found.view.module
        action = "multiplies matrices" if unknown else "multiplies with a parameter"
        return self._refuse(
            f"{op} {action} in a way that cannot be quantized yet ({found.reason}), and would silently run in high "
            f"precision. To keep it, {rule_that_keeps(op, module)}",
            module,
        )

    def _keep(self, found: FoundWork, reason: str, decision: Decision | None = None) -> None:
        values = [value for argument in found.node.all_input_nodes if (value := value_of(argument)) is not None]
        rule, index = (None, None) if decision is None else (decision.rule.name, decision.index)
        self.sites.append(
            Site(
                found.view.module if found.module is None else found.module,
                found.view.op,
                tuple(_shape(value.shape) for value in values[:2]),
                rule,
                reason,
                dict(NOTHING.specs),
                quantized=False,
                rule_index=index,
                flops=flops.of_node(found.node, found.formula),
                supported=found.supported,
            )
        )

    def _refuse(self, message: str, module: str | None) -> None:
        if self.refused is None:
            self.refused = CaptureError(message, site=module or "(root)")


def _lowered(product: Product, program: MatmulProgram) -> Callable[[], Schedule]:
    """Return a function that lowers ``program`` for the factors of ``product``, by the kernels available at a call."""
    (a, b), y = product.values, value_of(product.node)
    dtype = a.dtype if y is None else y.dtype  # under autocast, its dtype
    dtypes, needs, experts = (a.dtype, b.dtype), (a.requires_grad, b.requires_grad), product.ends is not None
    setting = partial(Setting, dtypes=dtypes, dtype=dtype, needs=needs, drawn=program.draws, experts=experts)
    return partial(_schedule, program, a.device, setting)


def _schedule(program: MatmulProgram, device: torch.device, setting: Callable[[Machine], Setting]) -> Schedule:
    return lower(program, setting(Machine.of(device)))


def _is_one_of_a_stack(found: FoundProduct) -> bool:
    """Return whether the second factor is one matrix of a parameter of three axes."""
    if found.owner is None or not found.views:
        return False
    stack, matrix = value_of(found.views[0].args[0]), value_of(found.product.b)
    return stack is not None and matrix is not None and matrix.dim() == 2 < stack.dim()


def _exact(program: MatmulProgram | None, op: str) -> tuple[Gemm, ...]:
    """Return the GEMMs whose operands are bf16 numbers by construction; experts have none, because they multiply in the
    model's dtype."""
    gemms = () if program is None or op == "grouped" else (program.fprop, program.dgrad, program.wgrad)
    return tuple(gemm.gemm for gemm in gemms if gemm.is_exact())


def _apart_specs(apart: Apart) -> dict[Operand, QuantSpec | None]:
    """Return the specs of channels that are multiplied apart."""
    operands = (operand for operand in Operand if operand.gemm is not Gemm.DGRAD)
    return {operand: apart.program.operand(operand).spec for operand in operands}


def _shape(shape: Iterable[int | SymInt]) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in shape)
