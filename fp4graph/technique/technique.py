"""The base class of techniques: fields are options, methods are the stages at which a technique acts.

A technique is frozen data (a pydantic model), so that equal options mean equal compiled code. Planning methods see
the site. Tensor methods see tensors only and must be pure functions of them, because one compiled operand program
serves every site of the same plan. A class overrides the stages it needs and inherits the identity for the rest.
docs/techniques.md lists the stages with their signatures, the techniques that use them, and the order of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getattr_static
from types import FunctionType
from typing import Literal, Self, get_args

from torch import Tensor

from fp4graph.numerics.blocking import Granularity, Groups
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.context import Context, Quantization
from fp4graph.technique.facts import Facts, Mixes, OperandSpecs, Partition, StateEntry
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.site import SiteView
from fp4graph.technique.updates import OptimizerStep, WeightUpdate


class Technique(Facts):
    """The base of every technique: a subclass sets ``name`` and ``overhead`` and declares its options as fields.

    Tensor stages work in the *blocked layout* (:class:`~fp4graph.numerics.blocking.Blocking`): values have the axes
    inside a block as axes of their own, and statistics and scales have these axes with size 1. Everything is fp32
    unless a method says otherwise.
    """

    # ------------------------------------------------------------------ facts that follow from the stages

    @property
    def sees_blocks(self) -> bool:
        """True if the result depends on how an operand is cut into blocks; ``split`` and ``after`` see it uncut."""
        inside = any(overrides(self, stage) for stage in TENSOR_STAGES if stage not in ("split", "after"))
        return self.group_granularity is not None or (inside and self.mixes != "none")

    @property
    def steps_weight(self) -> bool:
        """True if the technique acts on each weight at the optimizer's step."""
        return overrides(self, "before_step") or overrides(self, "after_step")

    # ------------------------------------------------------------------ planning

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> Technique | None:
        """Return the technique, with options, that a policy gets by writing ``spec``, or None.

        Ω is then the same however the policy is written: ``rounding: stochastic`` costs what the technique costs.
        """
        return None

    def check(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> None:
        """Raise ValueError if the options fit no site of a rule; called when a policy is loaded.

        Args:
            specs: the specs of the rule's operands, after every technique's :meth:`plan`.
            techniques: all techniques of the rule by name, this one included.
        """

    def inert(self, specs: OperandSpecs, techniques: Mapping[str, Technique]) -> str | None:
        """Return the reason why this technique changes nothing beside the others, or None; the author is warned."""
        return None

    def plan(self, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
        """Return the specs of a site's operands, changed or not; raise ValueError if options do not fit it."""
        return specs

    def acts_on(self, site: SiteView) -> frozenset[Operand]:
        """Return the operands at whose tensor stages (split ... group_gradient, observe) this technique takes part.

        By default these are the forward weight of a linear layer for a technique ``on_weight``, and else the operands
        that its options of type :data:`~fp4graph.technique.Operands` list, if it has tensor stages at all.
        """
        if self.on_weight:
            return frozenset({Operand.FPROP_WEIGHT}) if site.multiplies_weight else frozenset()
        return self.operands_listed if any(overrides(self, stage) for stage in TENSOR_STAGES) else frozenset()

    def for_operand(self, operand: Operand) -> Self:
        """Return the technique as it acts at the tensor stages of ``operand``, which do not learn the operand's name.

        Override it where an option has another value for some operands: return an equal technique for operands that
        are treated alike, because equal techniques share compiled code.
        """
        return self

    def pairs(self, site: SiteView) -> frozenset[Gemm]:
        """Return the GEMMs whose two operands this technique transforms together."""
        return frozenset()

    def state(self, site: SiteView) -> tuple[StateEntry, ...]:
        """Return the tensors to keep for the weight of ``site``."""
        return ()

    def partition(self, site: SiteView, specs: OperandSpecs) -> Partition | None:
        """Return the input channels of a linear layer that are multiplied apart, under other specs; None for none.

        ``specs`` are those of the site after every technique's :meth:`plan`. Raise ValueError if options do not fit.
        """
        return None

    # ------------------------------------------------------------------ pair transform

    def pair_context(self, left: Tensor, right: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return tensors that both operands ``[..., K]`` of a GEMM share, such as random signs or channel scales."""
        return ()

    def transform(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Return an operand in the new basis, contraction axis last: ``transform(l) @ transform(r)ᵀ = l @ rᵀ``."""
        return x

    def inverse(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Return an operand in the old basis, contraction axis last: the inverse of :meth:`transform`."""
        return x

    # ------------------------------------------------------------------ one operand

    def split(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Return ``x [..., K]`` as (part to quantize, residual or None), both of its dtype.

        The residual is multiplied apart, in high precision, and added to the product.
        """
        return x, None

    def around(self, quantize: Callable[[Tensor], Tensor], x: Tensor, context: Context) -> Tensor:
        """Return the operand quantized, by calls of ``quantize`` on tensors of the shape of ``x``.

        Each call after the first draws its own noise and rounds by the spec alone, because weight state describes the
        weight and not a residual of it.
        """
        return quantize(x)

    def block_statistic(self, values: Tensor, z: Tensor, context: Context) -> Tensor:
        """Return the block statistic Z, shape of ``z``: the block amax, unless an earlier technique changed it."""
        return z

    def group_statistic(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor:
        """Return the group statistic g, shape of ``g``: the maximum of the group's Z, unless changed before."""
        return g

    def group_scale(
        self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Return the group scale γ, by which the operand is quantized as γ·f(x/γ); None stands for 1.

        Args:
            group: returns g, the group statistic at a granularity, broadcastable to ``z``. The derivative takes γ to be
                proportional to the g asked for (EL Eq. 3).

        Returns:
            γ, broadcastable to ``z``; or γ and the block statistic of x/γ, if the latter is not ``z / γ``.
        """
        return None

    def scale(self, values: Tensor, z: Tensor, context: Context) -> Tensor | None:
        """Return the stored block scales in the spec's convention, shape of ``z``; None leaves them to the spec."""
        return None

    def round(self, ratio: Tensor, scale: Tensor, context: Context) -> Tensor | None:
        """Return ``ratio = x/S`` rounded to values of the element format; None leaves rounding to the spec.

        ``scale`` broadcasts against ``ratio`` and against the ``weight_like`` entries of ``context.state``, which were
        divided by the group scales γ as the values were.
        """
        return None

    def rescale(self, quantization: Quantization, context: Context) -> Tensor | None:
        """Return the stored block scales that stand for rounded elements, fp32, shape of ``quantization.scale``, which
        elements were rounded under; None leaves them."""
        return None

    def after(self, x: Tensor, context: Context) -> Tensor:
        """Return the dequantized operand ``[..., K]``, changed, in the shape and dtype of ``x``."""
        return x

    def observe(self, quantization: Quantization, context: Context) -> Mapping[str, Tensor]:
        """Return new values of entries whose ``writer`` is the graph, after a forward with gradients or a backward."""
        return {}

    # ------------------------------------------------------------------ gradient of the fprop quantizers
    # The engine composes what these return as EL Eq. 1 and 3 do; see fp4graph.ops.gradient.

    def element_surrogate(self, ratio: Tensor, context: Context) -> Tensor | None:
        """Return the surrogate Q'(u) at ``ratio = u``; None is the straight-through 1."""
        return None

    def scale_surrogate(self, ideal: Tensor, context: Context) -> Tensor | None:
        """Return the surrogate q'(s) at the unrounded scale of the convention; None is the straight-through 1."""
        return None

    def statistic_gradient(self, values: Tensor, z: Tensor, context: Context) -> Tensor | None:
        """Return dZ/dX, shape of ``values``; None treats the scale as a constant. ``values`` and ``z`` are from before
        group scales."""
        return None

    def group_gradient(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor | None:
        """Return dg/dX of the group statistic, shape of ``values``; None treats the group scale as a constant."""
        return None

    # ------------------------------------------------------------------ optimizer

    def before_step(self, update: WeightUpdate) -> None:
        """Act before ``optimizer.step()``, once for each quantized weight of the technique's rules with a gradient."""

    def after_step(self, update: WeightUpdate) -> None:
        """Act after ``optimizer.step()``, once for each of the same weights."""

    def before_optimizer(self, step: OptimizerStep) -> None:
        """Act before ``optimizer.step()``, once for all parameters, after :meth:`before_step` of the weights."""

    def after_optimizer(self, step: OptimizerStep) -> None:
        """Act after ``optimizer.step()``, once for all parameters, after :meth:`after_step` of the weights."""

    @property
    def loss_scaler(self) -> Mapping[str, float] | None:
        """The arguments of torch's ``GradScaler`` that ``fp4graph.grad_scaler`` enables; None asks for none."""
        return None


#: Stages whose presence changes the result of an operand's quantizer.
QUANTIZER_STAGES = (
    "split", "around", "block_statistic", "group_statistic", "group_scale", "scale", "round", "rescale", "after",
)  # fmt: skip

#: Stages whose presence replaces the straight-through estimator.
GRADIENT_STAGES = ("element_surrogate", "scale_surrogate", "statistic_gradient", "group_gradient")

#: Stages of one operand, which take part in the operand programs of :meth:`Technique.acts_on`.
TENSOR_STAGES = (*QUANTIZER_STAGES, "observe", *GRADIENT_STAGES)

#: Stages around the optimizer's step.
OPTIMIZER_STAGES = frozenset({"before_step", "after_step", "before_optimizer", "after_optimizer"})

#: The methods that are stages, in the order in which they act.
STAGES = (
    "plan", "state", "partition", "pair_context", "transform", "inverse", *TENSOR_STAGES,
    "before_step", "before_optimizer", "after_step", "after_optimizer", "loss_scaler",
)  # fmt: skip


def checked_plan(technique: Technique, site: SiteView, specs: OperandSpecs) -> OperandSpecs:
    """Return the result of :meth:`Technique.plan`, checked: an operand left out would pass for high precision.

    Raises:
        TypeError: the result does not map all six operands to specs or None.
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
    """Return whether ``technique`` acts at ``stage``, that is, overrides the method of that name."""
    cls = technique if isinstance(technique, type) else type(technique)
    return getattr(cls, stage) is not getattr(Technique, stage)


#: Stages that are given what the elements of a block share.
_OF_BLOCKS = tuple(s for s in TENSOR_STAGES if s not in ("split", "round", "after", "element_surrogate"))
_PAGE = "docs/techniques.md, 'Facts that a technique declares'"
#: What says today what a class said by an attribute of an earlier version.
_FORMER = {
    "by_block": "mixes = 'block', or 'none' if other elements of a block change nothing, but only if split, around, "
    "after and transform mix no values of different blocks and results do not depend on a block's place",
    "by_expert": "mixes = 'expert', or 'block' or 'none' if the technique mixes no more",
    "divides_by": "group_granularity, and normalizes = True",
}


def wrong_fact(cls: type[Technique]) -> str | None:
    """Return what a class declares that cannot be, or declared in an earlier version; None if all is well."""
    for former, today in _FORMER.items():
        if hasattr(cls, former):
            return f"declares {former}, which says nothing any more; declare {today}; see {_PAGE}"
    if isinstance(getattr_static(cls, "block_rotation"), FunctionType):
        return "has a method block_rotation; make it a property that is g, and return the signs from pair_context"
    if isinstance(getattr_static(cls, "mixes"), property):
        return f"has a property mixes; declare the most that it mixes with any options, as mixes = 'block'; see {_PAGE}"
    if cls.mixes not in get_args(Mixes):
        return f"declares mixes = {cls.mixes!r}; choose from {', '.join(get_args(Mixes))}"
    declared: object = cls.on_experts
    if not isinstance(declared, frozenset | set):
        return f"declares on_experts = {declared!r}; write the stages as a set, {{'round'}}"
    if idle := [stage for stage in declared if stage not in QUANTIZER_STAGES or not overrides(cls, stage)]:
        return f"declares on_experts with {min(idle)!r}, at which it does not act; name stages of its quantizer"
    shared = [stage for stage in _OF_BLOCKS if overrides(cls, stage)]
    if cls.mixes == "none" and shared and not overrides(cls, "group_granularity"):
        return f"declares mixes = 'none' and acts on whole blocks at {shared[0]}; declare 'block', or how much it mixes"
    return None
