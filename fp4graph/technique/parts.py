"""The parts of a technique: each says on which operands it acts, and acts there by a few methods.

A method that returns None leaves things as they are. Parts are frozen data: equal parts share compiled code. Tensor
methods must be pure functions of their tensors. They work in the *blocked layout*
(:class:`~fp4graph.numerics.blocking.Blocking`): values have the axes inside a block as axes of their own; statistics
and scales have these axes with size 1. Everything is fp32 unless a method says otherwise. docs/techniques.md has the
order of the methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from inspect import get_annotations
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, dataclass_transform, get_args

from fp4graph.numerics.blocking import Granularity, Groups
from fp4graph.technique.context import Context, Quantization
from fp4graph.technique.facts import Mixes, OperandSpecs, Partition, StateEntry
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.updates import OptimizerStep, WeightUpdate

if TYPE_CHECKING:
    from torch import Tensor


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True, repr=False)
class Part:
    """The base of all parts. A subclass becomes a frozen dataclass by itself, and may give fields new defaults.

    Attributes:
        options: the technique that the part belongs to: its options by name.
        operands: the operands on which the part acts. None stands for the forward weight if the technique acts
            ``on_weight``, and else for those of the operands that its options list at which this kind of part can act.
        mixes: what the result of an element depends on, besides γ and a ``block_rotation``: "none", the element and its
            scale; "block", its block; "expert", the operand, in a grouped product the tokens of its expert; "tensor",
            the operand, so that grouped products refuse the part. Every class with tensor methods declares it.
        draws: whether a method uses random bits or ``count`` of its context.
        counts: whether the result depends on the number of an operand's elements or blocks, as a quantile does. The
            engine then refuses the part at the operands of wgrad in a grouped product, where zeros fill up the tokens
            of an expert.
        state: the tensors that the technique keeps for a weight; one of its parts lists each.
    """

    stages: ClassVar[tuple[str, ...]] = ("observe",)  # the methods of the kind, in the order in which they act
    acted: ClassVar[frozenset[str]] = frozenset()  # the methods that a class defines
    required: ClassVar[frozenset[str]] = frozenset()  # the methods that a class must define
    kind: ClassVar[str] = "Part"  # the name of the class of this module that a part derives from
    among: ClassVar[frozenset[Operand]] = frozenset(Operand)  # the operands at which the kind can act

    options: Any
    mixes: Mixes = "tensor"
    operands: frozenset[Operand] | None = None
    draws: bool = False
    counts: bool = False
    state: tuple[StateEntry, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        inherited = {field.name for field in fields(cls)}
        annotations = get_annotations(cls)
        for name in inherited & vars(cls).keys() - annotations.keys():
            if isinstance(vars(cls)[name], property | FunctionType):
                raise TypeError(f"{cls.__name__}: {name} is a field; pass its value when the part is made")
            annotations[name] = Any  # a new default
        cls.__annotations__ = annotations
        dataclass(frozen=True, kw_only=True, repr=False)(cls)
        if cls.__module__ == __name__:
            cls.kind = cls.__name__
            return
        added = {field.name for field in fields(cls)} - {*inherited, "period"}
        if taken := added & {*vars(Part), *STAGES}:
            raise TypeError(f"{cls.__name__} has a field {min(taken)}, which is a member of parts; rename the field")
        cls._check_class()

    @classmethod
    def _check_class(cls) -> None:
        """Find the stages of a class; raise TypeError if a method would not run, or ``mixes`` is not declared."""
        kinds = [base.__name__ for base in cls.__mro__ if base.__module__ == __name__ and base is not Part]
        if len(kinds) > 1:
            raise TypeError(f"{cls.__name__} is a {' and a '.join(kinds)}; make a part of each")
        bases = [base for base in cls.__mro__ if base.__module__ != __name__]
        methods = {stage for stage in STAGES if any(stage in vars(base) for base in bases)}
        if foreign := sorted(methods - {*cls.stages}):
            takes = ", ".join(kind.__name__ for kind in KINDS if foreign[0] in kind.stages)
            raise TypeError(f"{cls.__name__} is a {cls.kind} and has a method {foreign[0]}, which belongs to: {takes}")
        cls.acted = frozenset(methods)
        if missing := sorted(cls.required - methods):
            raise TypeError(f"{cls.__name__} has no method {missing[0]}, which a {cls.kind} needs")
        base = next(base for base in cls.__bases__ if issubclass(base, Part))
        changed = [stage for stage in cls.stages if getattr(cls, stage) is not getattr(base, stage)]
        tensor = next((stage for stage in changed if stage in (*PairTransform.stages, *TENSOR_STAGES)), None)
        if tensor is not None and "mixes" not in vars(cls):
            raise TypeError(
                f"{cls.__name__} has a method {tensor} and must declare what it mixes, as one of "
                f"{', '.join(get_args(Mixes))}: mixes = 'block'; see docs/techniques.md, 'Fields of a part'"
            )
        cls._check_mixes(cls.mixes)

    @classmethod
    def _check_mixes(cls, mixes: str) -> None:
        if mixes not in get_args(Mixes):
            raise TypeError(f"{cls.__name__} declares mixes = {mixes!r}; choose from {', '.join(get_args(Mixes))}")
        of_blocks = min(cls.acted & _OF_BLOCKS, default=None)
        if of_blocks is not None and mixes == "none":
            raise TypeError(
                f"{cls.__name__} declares mixes = 'none' and acts on whole blocks at {of_blocks}; declare 'block', "
                "'expert' or 'tensor'"
            )

    def __post_init__(self) -> None:
        self._check_mixes(self.mixes)

    def __repr__(self) -> str:
        """Show sets sorted: the names of site functions depend on this text and must be the same in every process."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        shown = (f"{name}={sorted(value) if isinstance(value, frozenset) else value!r}" for name, value in values)
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def name(self) -> str:
        """The technique's name."""
        return str(self.options.name)

    @property
    def key(self) -> str:
        """The name under which the part draws, made of technique and kind: the policy's order does not matter."""
        return f"{self.name}.{self.kind}"

    @property
    def plugin(self) -> str:
        """The plugin that offers the technique, for errors."""
        return self.options.plugin or self.name

    @property
    def period(self) -> int:
        """The number of elements along the contraction axis that are treated together."""
        return 1

    def acts_at(self, stage: str) -> bool:
        """Return whether the part acts at ``stage``."""
        return stage in self.acted

    def observe(self, quantization: Quantization, context: Context) -> Mapping[str, Tensor]:
        """Return new values of entries whose ``writer`` is the graph, after a forward with gradients or a backward."""
        raise NotImplementedError


class PairTransform(Part):
    """Transforms both operands of a GEMM so that the product stays: ``transform(l) @ transform(r)ᵀ = l @ rᵀ``.

    Attributes:
        gemms: the GEMMs whose operands are transformed.
        block_rotation: g, if the transform is the rotation x·S·H of blocks of g elements; S is the diagonal of the one
            tensor of ``pair_context``, or the identity without one. Kernels then rotate by themselves.
    """

    stages: ClassVar[tuple[str, ...]] = ("pair_context", "transform", "inverse")
    required: ClassVar[frozenset[str]] = frozenset({"transform", "inverse"})
    among: ClassVar[frozenset[Operand]] = frozenset()  # ``gemms`` says where it acts
    gemms: frozenset[Gemm] = frozenset(Gemm)
    block_rotation: int | None = None

    @property
    def period(self) -> int:
        """g of a rotation of blocks; override it for a transform that mixes other elements."""
        return self.block_rotation or 1

    def pair_context(self, left: Tensor, right: Tensor, context: Context) -> tuple[Tensor, ...] | None:
        """Return tensors that both operands ``[..., K]`` of a GEMM share, such as random signs or channel scales."""

    def transform(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Return an operand in the new basis, contraction axis last."""
        raise NotImplementedError

    def inverse(self, x: Tensor, side: Literal["left", "right"], shared: tuple[Tensor, ...]) -> Tensor:
        """Return an operand in the old basis, contraction axis last: the inverse of :meth:`transform`."""
        raise NotImplementedError


class Wrapper(Part):
    """Acts around the quantizer of an operand ``[..., K]``.

    Attributes:
        draws_in_evaluation: whether noise that ``after`` adds stays on in evaluation; otherwise it is off there.
    """

    stages: ClassVar[tuple[str, ...]] = ("split", "around", "after", "observe")
    draws_in_evaluation: bool = False

    def split(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor | None] | None:
        """Return ``x`` as (part to quantize, residual or None), both of its dtype; the residual is multiplied apart, in
        high precision, and added to the product."""

    def around(self, quantize: Callable[[Tensor], Tensor], x: Tensor, context: Context) -> Tensor | None:
        """Return the operand quantized, in the shape of ``x``, by calls of ``quantize`` on tensors of this shape.

        In place of a tensor of equal lines ``quantize`` also takes one line, with size 1 along the axis of the lines,
        and then returns a tensor that broadcasts to ``x``.

        Each call of ``quantize`` after the first draws new noise and rounds by the spec alone, because weight state
        describes the weight and not a residual of it.
        """

    def after(self, x: Tensor, context: Context) -> Tensor | None:
        """Return the dequantized operand, changed, in the shape and dtype of ``x``."""


class BlockScale(Part):
    """Chooses statistics and scales: what the elements of a block are divided by.

    Attributes:
        group_granularity: the elements that share the γ of :meth:`group_scale`: "tensor", "all", "row" or their number
            along the contraction axis; None if there is no γ, or if each call decides.
        constant: whether γ is one number that depends on no data.
        normalizes: whether γ is the statistic g of its groups up to a constant, so that operands are quantized as
            U = X/g. Other parts of the operand then read :attr:`group_granularity` as ``context.normalized``.
    """

    stages: ClassVar[tuple[str, ...]] = (
        "block_statistic", "group_statistic", "group_scale", "scale", "rescale", "observe",
    )  # fmt: skip
    group_granularity: Granularity | None = None
    constant: bool = False
    normalizes: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        name, granularity, divides = type(self).__name__, self.group_granularity, self.acts_at("group_scale")
        if granularity not in (None, "tensor", "all", "row") and not (isinstance(granularity, int) and granularity > 0):
            raise TypeError(f"{name} has group_granularity {granularity!r}; choose 'tensor', 'all', 'row' or a number")
        if self.normalizes and not (divides and granularity is not None):
            raise TypeError(f"{name} normalizes, and lacks a method group_scale or the group_granularity of its γ")

    @property
    def period(self) -> int:
        """The length of the groups that share a γ."""
        return self.group_granularity if isinstance(self.group_granularity, int) else 1

    def block_statistic(self, values: Tensor, z: Tensor, context: Context) -> Tensor | None:
        """Return the block statistic Z, shape of ``z``: the block amax, unless an earlier technique changed it."""

    def group_statistic(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor | None:
        """Return the group statistic g, shape of ``g``: the maximum of the group's Z, unless changed before.

        It serves the γ of parts that have ``normalizes`` set; the γ of other parts is computed from the maximum.
        """

    def group_scale(
        self, z: Tensor, group: Callable[[Granularity], Tensor], context: Context
    ) -> Tensor | tuple[Tensor, Tensor] | None:
        """Return the group scale γ, by which the operand is quantized as γ·f(x/γ); None stands for 1.

        ``group`` returns g, the group statistic at a granularity, broadcastable to ``z``. The derivative takes γ to be
        proportional to g if the part ``normalizes``, else to be constant (:class:`Gradient`). γ is broadcastable to
        ``z``. If the block statistic of x/γ is not ``z / γ``, return γ and this statistic.
        """

    def scale(self, values: Tensor, z: Tensor, context: Context) -> Tensor | None:
        """Return the stored block scales in the spec's convention, shape of ``z``; None leaves them to the spec.

        ``weight_like`` entries of ``context.state`` were divided by the group scales γ as the values were.
        """

    def rescale(self, quantization: Quantization, context: Context) -> Tensor | None:
        """Return the scales stored for rounded elements, fp32, in place of ``quantization.scale`` and in its shape."""


class Rounding(Part):
    """Rounds elements."""

    stages: ClassVar[tuple[str, ...]] = ("round", "observe")

    def round(self, ratio: Tensor, scale: Tensor, context: Context) -> Tensor | None:
        """Return ``ratio = x/S`` rounded to values of the element format; None leaves rounding to the spec.

        ``scale`` broadcasts against ``ratio`` and against the ``weight_like`` entries of ``context.state``, which were
        divided by the group scales γ as the values were.
        """


class Gradient(Part):
    """Differentiates the quantizers of fprop, by Eq. 1 and 3 of "Elucidating the Design Space of FP4 Training"
    (:mod:`fp4graph.ops.gradient`). A factor that is None is the factor of the straight-through estimator."""

    stages: ClassVar[tuple[str, ...]] = ("element_surrogate", "scale_surrogate", "statistic_gradient", "group_gradient")
    among: ClassVar[frozenset[Operand]] = frozenset(Gemm.FPROP.operands)

    def element_surrogate(self, ratio: Tensor, context: Context) -> Tensor | None:
        """Return the surrogate Q'(u) at ``ratio = u``; None is 1."""

    def scale_surrogate(self, ideal: Tensor, context: Context) -> Tensor | None:
        """Return the surrogate q'(s) at ``ideal``, the unrounded scale in the spec's convention; None is 1."""

    def statistic_gradient(self, values: Tensor, z: Tensor, context: Context) -> Tensor | None:
        """Return dZ/dX, shape of ``values``; None treats the scale as a constant. ``values`` and ``z`` are not divided
        by group scales."""

    def group_gradient(self, values: Tensor, g: Tensor, groups: Groups, context: Context) -> Tensor | None:
        """Return dg/dX of the group statistic, shape of ``values``; None treats the group scale as a constant."""


class ChannelSplit(Part):
    """Has some input channels of a linear layer multiplied apart, under other specs."""

    stages: ClassVar[tuple[str, ...]] = ("partition",)
    among: ClassVar[frozenset[Operand]] = frozenset()

    def partition(self, specs: OperandSpecs) -> Partition | None:
        """Return the channels and their specs, or None; ``specs`` are the site's, after every technique's ``plan``."""


class OptimizerHook(Part):
    """Acts around ``optimizer.step()``. It must not depend on the site, because it acts on weights of many sites.

    ``reads_quantized`` is False if it calls neither ``quantize`` nor ``quantization`` of an update. It then acts on
    parameters too of which products multiply with parts that have scales of their own.
    """

    reads_quantized: ClassVar[bool] = True
    stages: ClassVar[tuple[str, ...]] = ("before_step", "before_optimizer", "after_step", "after_optimizer")
    mixes: Mixes = "none"

    def before_step(self, update: WeightUpdate) -> None:
        """Act before ``optimizer.step()``, once for each weight with a gradient that the technique's rules quantize."""

    def after_step(self, update: WeightUpdate) -> None:
        """Act after ``optimizer.step()``, once for each of the same weights."""

    def before_optimizer(self, step: OptimizerStep) -> None:
        """Act before ``optimizer.step()``, once for all parameters, after :meth:`before_step` of the weights."""

    def after_optimizer(self, step: OptimizerStep) -> None:
        """Act after ``optimizer.step()``, once for all parameters, after :meth:`after_step` of the weights."""


#: Stages whose presence changes the result of an operand's quantizer.
QUANTIZER_STAGES = (
    "split", "around", "block_statistic", "group_statistic", "group_scale", "scale", "round", "rescale", "after",
)  # fmt: skip
#: Stages whose presence replaces the straight-through estimator.
GRADIENT_STAGES = Gradient.stages
#: Stages of one operand.
TENSOR_STAGES = (*QUANTIZER_STAGES, "observe", *GRADIENT_STAGES)
#: Stages that see what the elements of a block share. A γ does not count: it declares its ``group_granularity``.
_OF_BLOCKS = frozenset(TENSOR_STAGES) - {"split", "round", "after", "element_surrogate", "group_scale", "observe"}
#: Stages around the optimizer's step.
OPTIMIZER_STAGES = frozenset(OptimizerHook.stages)
#: All stages of parts, in the order in which they act.
STAGES = (*ChannelSplit.stages, *PairTransform.stages, *TENSOR_STAGES, *OptimizerHook.stages)
#: The classes of parts, in the order in which they act.
KINDS: tuple[type[Part], ...] = (PairTransform, Wrapper, BlockScale, Rounding, Gradient, ChannelSplit, OptimizerHook)
