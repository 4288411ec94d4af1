"""What a technique is: one class whose fields are its options and whose methods are the stages it acts at.

A technique is frozen data (a pydantic model), so that equal options mean equal compiled code. Planning methods see
the site; tensor methods see tensors only and must be pure functions of them, because one compiled operand program
serves every site of the same plan. A class overrides the stages it needs and inherits the identity for the rest.
docs/techniques.md says which technique uses which stage, and in which order stages run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.context import Context, Quantization
from fp4graph.technique.operands import Gemm, Operand, OperandList
from fp4graph.technique.site import SiteView

if TYPE_CHECKING:
    from torch import Tensor

    from fp4graph.numerics.blocking import Granularity, Groups
    from fp4graph.technique.updates import OptimizerStep, WeightUpdate

#: Specs of one site's six operands; None is high precision.
OperandSpecs = Mapping[Operand, "QuantSpec | None"]


@dataclass(frozen=True)
class Overhead:
    """A row of "Elucidating the design space of FP4 training", Table 2: the cost on a tensor of n elements, block l."""

    compute: str
    memory: str
    fusable: bool


@dataclass(frozen=True)
class StateEntry:
    """A tensor that a technique keeps for each weight it acts on, as a buffer of the module that owns the weight.

    Attributes:
        name: of the buffer, after the technique's name (and the operand's, unless that is ``fprop.weight``).
        operand: whose stages receive it.
        init: makes the first value from the weight; called again when a plain checkpoint without the entry is loaded.
        writer: who changes it: the ``optimizer``'s step, or the ``graph`` (see :meth:`Technique.observe`).
        weight_like: whether it has the weight's shape; it is then rotated and cut into blocks as the weight is.
            Otherwise it has any shape and reaches the stages as it is.
    """

    name: str
    operand: Operand
    init: Callable[[Tensor], Tensor]
    writer: Literal["optimizer", "graph"] = "optimizer"
    weight_like: bool = True


class Technique(BaseModel):
    """Base of every technique; subclass it, set ``name`` and ``overhead``, declare options as fields.

    Tensor stages work in the *blocked layout* (:class:`~fp4graph.numerics.blocking.Blocking`): values have the axes
    inside a block as axes of their own, statistics and scales have those axes with size 1. Everything is fp32 unless
    a method says otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    name: ClassVar[str]
    #: Row of the paper's Table 2, shown by ``fp4graph techniques``.
    overhead: ClassVar[Overhead]
    #: Names of techniques that cannot share a site with this one, and of those it cannot do without.
    conflicts: ClassVar[frozenset[str]] = frozenset()
    requires: ClassVar[frozenset[str]] = frozenset()
    #: Whether it acts once for the whole model (on its loss, on all of an optimizer) and not rule by rule: then it is
    #: declared for the policy, and acts where nothing is quantized as well.
    per_model: ClassVar[bool] = False
    #: Whether what its stages from ``statistic`` to ``round`` make of a block depends on that block, and on its part of
    #: ``weight_like`` state, alone: neither on other blocks nor on its place. Statistics then quantize a few blocks
    #: again and not whole operands. Each class says it for itself; it is of no effect with ``split``, ``around`` or
    #: ``after``, or for one that ``draws``.
    by_block: ClassVar[bool] = False
    #: The plugin that offers it, for errors; the registry fills it in.
    plugin: ClassVar[str | None] = None

    # ------------------------------------------------------------------ options that list operands

    @classmethod
    def operand_lists(cls) -> dict[str, OperandList]:
        """Return the options that list operands, by name: those of type :data:`~fp4graph.technique.Operands`."""
        marks = ((name, mark) for name, field in cls.model_fields.items() for mark in field.metadata)
        return {name: mark for name, mark in marks if isinstance(mark, OperandList)}

    @property
    def operands_listed(self) -> frozenset[Operand]:
        """The operands that the options list, by default or as a policy says; empty without such an option."""
        lists = self.operand_lists().items()
        return frozenset().union(*(mark.select(getattr(self, name)) for name, mark in lists))

    @property
    def addresses_given(self) -> dict[str, tuple[str, ...]]:
        """The lists of operands that the policy's author wrote, by option; defaults and scopes are left out."""
        given = {name: getattr(self, name) for name in self.operand_lists() if name in self.model_fields_set}
        return {name: value for name, value in given.items() if isinstance(value, tuple)}

    def specs_listed(self, specs: OperandSpecs) -> dict[Operand, QuantSpec]:
        """Return the specs of the listed operands that are quantized, in the order of their names."""
        return {o: spec for o in sorted(self.operands_listed) if (spec := specs.get(o)) is not None}

    # ------------------------------------------------------------------ accounting

    @property
    def complexity(self) -> float:
        """The weight added to a policy's Ω (paper Table 9); may depend on the options."""
        raise NotImplementedError(f"{type(self).__name__} declares no complexity")

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> Technique | None:
        """The technique with the options that ``spec`` amounts to when a policy spells it as a spec, or None.

        Keeps Ω the same however the policy is written: ``rounding: stochastic`` costs what the technique costs.
        """
        return None

    # ------------------------------------------------------------------ planning

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Raise ValueError where the options fit no site of a rule; called when a policy is loaded.

        Args:
            specs: of the rule's operands, after every technique's :meth:`plan`.
            techniques: all of the rule, by name, this one included.
        """

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Why this technique would change nothing beside these, or None; a policy's author is warned of it."""
        return None

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Choose or change the specs of a site's operands. Raise ValueError where the options do not fit the site."""
        return specs

    def acts_on(self, site: SiteView) -> frozenset[Operand]:
        """Return the operands at whose tensor stages (split ... group_gradient, observe) this technique takes part.

        By default these are the operands that its options of type :data:`~fp4graph.technique.Operands` list, if it has
        tensor stages at all.
        """
        return self.operands_listed if any(overrides(self, stage) for stage in TENSOR_STAGES) else frozenset()

    def pairs(self, site: SiteView) -> frozenset[Gemm]:
        """The GEMMs whose two operands this technique transforms together."""
        return frozenset()

    def state(self, site: SiteView) -> tuple[StateEntry, ...]:
        """What is kept for the weight of ``site``."""
        return ()

    @property
    def draws(self) -> bool:
        """Whether a tensor stage of this technique uses ``noise``, ``constant`` or ``count`` of its context."""
        return False

    @property
    def draws_in_evaluation(self) -> bool:
        """Whether noise that ``after`` adds stays on in evaluation, where it is off otherwise."""
        return False

    @property
    def divides_by(self) -> Granularity | None:
        """The granularity of g, if this technique's group scale brings an operand to U = X/g up to a constant."""
        return None

    # ------------------------------------------------------------------ pair transform

    def pair_context(self, left: Tensor, right: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Tensors both operands of a GEMM share (random signs, channel scales). ``left``, ``right``: ``[..., K]``."""
        return ()

    def transform(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """One operand in the new basis, contraction axis last: ``transform(l) @ transform(r)ᵀ = l @ rᵀ``."""
        return x

    def inverse(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Undo :meth:`transform` on one operand, contraction axis last."""
        return x

    # ------------------------------------------------------------------ one operand

    def split(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """``x [..., K]`` as (part to quantize, residual or None), multiplied apart and summed; dtype of ``x``."""
        return x, None

    def around(self, quantize: Callable[[Tensor], Tensor], x: Tensor, context: Context) -> Tensor:
        """Wrap the composed quantizer: call ``quantize`` on tensors of the shape of ``x`` as often as needed.

        Each call after the first draws noise of its own and rounds by the spec alone (weight state describes the
        weight, not a residual of it).
        """
        return quantize(x)

    def block_statistic(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """The block statistic Z, shape of ``z``, which is the one chosen so far: the amax, unless changed before."""
        return z

    def group_statistic(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor:
        """The statistic g of groups of blocks that group scales use, shape of ``g``, the maximum of Z chosen so far."""
        return g

    def group_scale(
        self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """γ, broadcastable to ``z``: the operand is quantized as γ·f(x/γ). None is 1.

        Args:
            group: gives g, the group statistic at a granularity, broadcastable to ``z``. γ is taken to be
                proportional to the g asked for (EL Eq. 3 differentiates it so).

        Returns:
            γ alone, or γ and the statistic of x/γ where that is not ``z / γ``.
        """
        return None

    def scale(self, values: Tensor, z: Tensor, context: Context) -> Tensor | None:
        """The stored scale per block in the spec's convention, shape of ``z``; None leaves it to the spec."""
        return None

    def round(self, ratio: Tensor, scale: Tensor, context: Context) -> Tensor | None:
        """Element rounding: values of the element format for ``ratio = x/S``; None leaves it to the spec.

        ``scale`` broadcasts against ``ratio`` and against the ``weight_like`` entries of ``context.state``, which are
        divided by the group scales' γ as the values were.
        """
        return None

    def after(self, x: Tensor, context: Context) -> Tensor:
        """Change the dequantized operand ``[..., K]``, shape and dtype of ``x``."""
        return x

    def observe(self, quantization: Quantization, context: Context) -> Mapping[str, Tensor]:
        """New values for entries whose ``writer`` is the graph, after a forward with gradients (or a backward)."""
        return {}

    # ------------------------------------------------------------------ gradient of the fprop quantizers
    # The engine composes what these return as EL Eq. 1 and 3 do; see fp4graph.ops.gradient.

    def element_surrogate(self, ratio: Tensor, context: Context) -> Tensor | None:
        """Q'(u) at ``ratio = u``; None is the straight-through 1."""
        return None

    def scale_surrogate(self, ideal: Tensor, context: Context) -> Tensor | None:
        """q'(s) at the scale before rounding, in the spec's convention; None is the straight-through 1."""
        return None

    def statistic_gradient(self, values: Tensor, z: Tensor, context: Context) -> Tensor | None:
        """dZ/dX, shape of ``values``; None treats the scale as a constant. Both are as before group scales."""
        return None

    def group_gradient(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor | None:
        """dg/dX, shape of ``values``, of the group statistic; None treats the group scale as a constant."""
        return None

    # ------------------------------------------------------------------ optimizer

    def before_step(self, update: WeightUpdate) -> None:
        """Runs before ``optimizer.step()`` for each quantized weight of its rules that has a gradient; once, however
        many sites use the weight."""

    def after_step(self, update: WeightUpdate) -> None:
        """Runs after ``optimizer.step()``, likewise."""

    def before_optimizer(self, step: OptimizerStep) -> None:
        """Runs before ``optimizer.step()``, once, after :meth:`before_step` of the weights."""

    def after_optimizer(self, step: OptimizerStep) -> None:
        """Runs after ``optimizer.step()``, likewise."""

    # ------------------------------------------------------------------ loss

    @property
    def loss_scaler(self) -> Mapping[str, float] | None:
        """Arguments for torch's dynamic loss scaling, which ``fp4graph.grad_scaler`` turns on; None asks for none."""
        return None


#: Stages whose presence changes what an operand's quantizer gives.
QUANTIZER_STAGES = ("split", "around", "block_statistic", "group_statistic", "group_scale", "scale", "round", "after")

#: Stages whose presence replaces the straight-through estimator.
GRADIENT_STAGES = ("element_surrogate", "scale_surrogate", "statistic_gradient", "group_gradient")

#: Stages of one operand, which take part in the operand programs of :meth:`Technique.acts_on`.
TENSOR_STAGES = (*QUANTIZER_STAGES, "observe", *GRADIENT_STAGES)

#: Stages around the optimizer's step.
OPTIMIZER_STAGES = frozenset({"before_step", "after_step", "before_optimizer", "after_optimizer"})

#: The methods that are stages, in the order in which they act.
STAGES = (
    "plan", "state", "pair_context", "transform", "inverse", *TENSOR_STAGES,
    "before_step", "before_optimizer", "after_step", "after_optimizer", "loss_scaler",
)  # fmt: skip


def checked_plan(technique: Technique, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
    """What :meth:`Technique.plan` makes of ``specs``, checked: an operand left out would pass for high precision.

    Raises:
        TypeError: it is no mapping from all six operands to specs or None.
    """
    result = technique.plan(site, specs)
    if not isinstance(result, Mapping):
        raise TypeError(f"plan() must return a mapping of operands to specs; got {result!r}")
    if set(result) != set(Operand):
        wrong = sorted({str(key) for key in {*result} ^ {*Operand}})
        raise TypeError(f"plan() must return all six operands and nothing else; wrong or missing: {', '.join(wrong)}")
    for operand, spec in result.items():
        if not isinstance(spec, QuantSpec | None):
            raise TypeError(f"plan() must return a QuantSpec or None for each operand; got {spec!r} for {operand}")
    return result


def overrides(technique: Technique | type[Technique], stage: str) -> bool:
    """Whether ``technique`` acts at ``stage``, i.e. replaces the method of that name."""
    cls = technique if isinstance(technique, type) else type(technique)
    return getattr(cls, stage) is not getattr(Technique, stage)
