"""The base class of techniques: fields are options, methods are the stages at which a technique acts.

A technique is frozen data (a pydantic model), so that equal options mean equal compiled code. Planning methods see
the site. Tensor methods see tensors only and must be pure functions of them, because one compiled operand program
serves every site of the same plan. A class overrides the stages it needs and inherits the identity for the rest.
docs/techniques.md lists the stages with their signatures, the techniques that use them, and the order of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fp4graph.numerics.blocking import Granularity, Groups
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.context import Context, Quantization
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.options import OperandList
from fp4graph.technique.site import SiteView
from fp4graph.technique.updates import OptimizerStep, WeightUpdate

#: Specs of one site's six operands; None is high precision.
OperandSpecs = Mapping[Operand, "QuantSpec | None"]


@dataclass(frozen=True)
class Overhead:
    """The cost on a tensor of n elements in blocks of l, as "Elucidating the design space of FP4 training", Table 2."""

    compute: str
    memory: str
    fusable: bool


@dataclass(frozen=True)
class StateEntry:
    """A tensor that a technique keeps in the model for each weight it acts on, as a buffer of the weight's module.

    Tensor stages read the entry as ``context.state[name]``, stages of the optimizer as ``WeightUpdate.state[name]``.
    Keep here what the forward or the backward reads. What only the optimizer's stages read belongs into
    ``WeightUpdate.memory``, a dict in ``optimizer.state`` that is saved with the optimizer and needs no declaration.

    The buffer and ``WeightUpdate.state`` have the layout in which the module stores its weight: ``[K, N]`` for Hugging
    Face's Conv1D, ``[N, K]`` otherwise. Tensor stages get a ``weight_like`` entry as they get the operand: transposed,
    rotated and cut into blocks like the weight. Under FSDP2 the buffer of an entry of the weight's shape is a DTensor,
    sharded like the weight, and is gathered inside the graph; ``WeightUpdate.state`` holds the DTensor beside the
    parameter's. Floating-point buffers keep their dtype whatever ``model.to`` says.

    Attributes:
        name: the name of the entry; the buffer's name begins with the technique's (and the operand's, unless that is
            ``fprop.weight``).
        operand: the operand whose stages receive the entry.
        init: makes the first value from the whole weight, as stored. It is called by ``apply``, again at the first
            training forward, when the weights have their values, and when a checkpoint is loaded that lacks the entry.
            It must be a function of a module and not a lambda or a closure: plans compare entries by this function too,
            and one made anew at each call of :meth:`Technique.state` would share no compiled code.
        writer: the side that changes the entry: the ``optimizer``'s step, or the ``graph`` by
            :meth:`Technique.observe`.
        weight_like: whether the entry has the weight's shape. Otherwise it has any shape and reaches the stages as it
            is.
    """

    name: str
    operand: Operand
    init: Callable[[Tensor], Tensor]
    writer: Literal["optimizer", "graph"] = "optimizer"
    weight_like: bool = True


@dataclass(frozen=True)
class Partition:
    """Input channels that a linear layer multiplies apart from its others, under specs of their own.

    The layer's X and W are cut along K into the chosen channels C, those of the largest scores, and the rest R. Each
    part is gathered by falling score; of equal scores the first channel comes first::

        fprop   Y       = Q1(X_R) @ Q2(W_R)ᵀ + C1(X_C) @ C2(W_C)ᵀ
        dgrad   dX      = Q3(dY) @ Q4(Wᵀ)ᵀ
        wgrad   dW_R    = Q5(dYᵀ) @ Q6(X_Rᵀ)ᵀ,   dW_C = C5(dYᵀ) @ C6(X_Cᵀ)ᵀ

    Q are the site's quantizers, with its techniques; C are plain quantizers by :attr:`specs`. dgrad is one product in
    the layer's own order of channels; with ``source: fprop`` it reads what Q2 and C2 gave.

    Attributes:
        entry: the name of the technique's :class:`StateEntry` with the scores, fp32 ``[K]``: one of ``fprop.weight``
            that is not ``weight_like``.
        count: the number of chosen channels, from 1 to K - 1.
        specs: the specs of the chosen channels in fprop and wgrad, None or absent for high precision.
    """

    entry: str
    count: int
    specs: tuple[tuple[Operand, QuantSpec | None], ...]


class Technique(BaseModel):
    """The base of every technique: a subclass sets ``name`` and ``overhead`` and declares its options as fields.

    Tensor stages work in the *blocked layout* (:class:`~fp4graph.numerics.blocking.Blocking`): values have the axes
    inside a block as axes of their own, and statistics and scales have these axes with size 1. Everything is fp32
    unless a method says otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False)

    name: ClassVar[str]
    #: Row of the paper's Table 2, shown by ``fp4graph techniques``.
    overhead: ClassVar[Overhead]
    #: Names of techniques that cannot share a site with this one, and names of techniques that this one needs.
    conflicts: ClassVar[frozenset[str]] = frozenset()
    requires: ClassVar[frozenset[str]] = frozenset()
    #: True if the technique acts once for the whole model (on the loss, on all of an optimizer) and not rule by rule.
    #: It is then declared for the policy, and acts also if nothing is quantized.
    per_model: ClassVar[bool] = False
    #: True if the technique acts on the weight of a linear layer or of experts, and not on an activation in its place.
    on_weight: ClassVar[bool] = False
    #: True if the stages from ``block_statistic`` to ``rescale`` treat every block by itself: their results depend on
    #: the block and its part of ``weight_like`` state, and neither on other blocks nor on the block's place. Statistics
    #: then quantize a few blocks again instead of whole operands. Each class declares it for itself. It has no effect
    #: beside ``split``, ``around`` or ``after``, or if the technique ``draws``.
    by_block: ClassVar[bool] = False
    #: True if the technique is right in a grouped product (``op: grouped``), where no statistic may mix experts: its
    #: stages treat every block by itself, or take statistics from ``group`` and :class:`Groups`, which tell experts
    #: apart; what mixes elements along the contraction axis says so by :attr:`period`. The engine refuses any other
    #: technique at a grouped product, except one that is ``by_block`` and has no stage outside one call of the
    #: quantizer.
    by_expert: ClassVar[bool] = False
    #: True if the result depends on the number of an operand's elements or blocks, as a quantile does. The engine then
    #: refuses the technique at the operands of wgrad in a grouped product, where zeros fill up the tokens of an expert.
    counts: ClassVar[bool] = False
    #: The plugin that offers the technique, for errors; set by the registry.
    plugin: ClassVar[str | None] = None

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse ``on_weight`` beside an option that lists operands: the two would contradict each other."""
        if cls.on_weight and (lists := ", ".join(cls.operand_lists())):
            raise TypeError(
                f"{cls.__name__} acts on_weight, and its option {lists} lists operands; declare one of the two"
            )

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
        """Return the specs of the listed operands that are quantized, in TetraJet's order."""
        listed = self.operands_listed
        return {o: spec for o in Operand if o in listed and (spec := specs.get(o)) is not None}

    # ------------------------------------------------------------------ accounting

    @property
    def complexity(self) -> float:
        """The weight that the technique adds to a policy's Ω (paper Table 9).

        A class declares it as a constant, or as a property if it depends on the options.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no complexity")

    @classmethod
    def implied_by(cls, spec: QuantSpec) -> Technique | None:
        """Return the technique, with options, that a policy gets by writing ``spec``, or None.

        Ω is then the same however the policy is written: ``rounding: stochastic`` costs what the technique costs.
        """
        return None

    # ------------------------------------------------------------------ planning

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

    @property
    def period(self) -> int:
        """The elements along the contraction axis that a pair transform or a group scale treats together."""
        return 1

    @property
    def draws(self) -> bool:
        """True if a tensor stage of this technique uses ``noise``, ``constant`` or ``count`` of its context."""
        return False

    @property
    def draws_in_evaluation(self) -> bool:
        """True if noise that ``after`` adds stays on in evaluation mode; otherwise it is off there."""
        return False

    @property
    def divides_by(self) -> Granularity | None:
        """The granularity of g if this technique's group scale makes U = X/g, up to a constant, of an operand X."""
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

    def block_rotation(self, shared: tuple[Tensor, ...]) -> tuple[int, Tensor | None] | None:
        """Return (g, signs) where :meth:`transform` is the rotation x·S·H of blocks of g elements; else None.

        S is the diagonal of ``signs``, ±1, ``[g]``, or the identity for None; H is the orthonormal Sylvester-Hadamard
        matrix of a power of two g; the product is in fp32, and axes that g does not divide are zero-padded. A kernel
        may then rotate what it reads by itself, and :meth:`transform` is not called. A class that overrides
        :meth:`transform` or :meth:`inverse` says anew whether it is one.
        """
        return None

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
        TypeError: the result is no mapping from all six operands to specs or None.
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
