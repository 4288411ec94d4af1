"""The data that techniques declare: facts about themselves, tensors that they keep, channels that they part.

Where a technique may act and which code computes it follows from these facts, before anything runs. A fact that does
not depend on options is an attribute of the class, also where :class:`Facts` has a property:
``block_rotation: ClassVar[int] = 16``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fp4graph.numerics.blocking import Granularity
from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.operands import Operand
from fp4graph.technique.options import OperandList

#: Specs of one site's six operands; None is high precision.
OperandSpecs = Mapping[Operand, "QuantSpec | None"]
#: The elements that may change what a technique does to an element of the same operand; each includes the ones before.
Mixes = Literal["none", "block", "expert", "tensor"]


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
            and a new function at each call of :meth:`Technique.state` would prevent shared compiled code.
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


class Facts(BaseModel):
    """The facts of a technique that the engine reads without calling a stage; a class that declares none has these."""

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
    #: What an element's result depends on, besides a γ of :attr:`group_granularity` and a :attr:`block_rotation`:
    #: "none", the element, its scale and its part of ``weight_like`` state; "block", also the other elements of its
    #: block; "expert", any element of the operand, in a grouped product (``op: grouped``) any that belongs to the same
    #: expert, which :class:`Groups` and ``context.blocking.segments`` tell apart; "tensor", any element whatever. The
    #: engine refuses "tensor" in grouped products. Statistics of a training quantize a few blocks again instead of
    #: whole operands for "none" and "block", which each class declares for itself.
    mixes: ClassVar[Mixes] = "tensor"
    #: True if the result depends on the number of an operand's elements or blocks, as a quantile does. The engine then
    #: refuses the technique at the operands of wgrad in a grouped product, where zeros fill up the tokens of an expert.
    counts: ClassVar[bool] = False
    #: The stages at which the technique acts only on operands of experts. On other operands these methods return None.
    on_experts: ClassVar[frozenset[str]] = frozenset()
    #: True if γ is the statistic g of its groups up to a constant, so that operands are quantized as U = X/g. Other
    #: techniques of the operand then read :attr:`group_granularity` as ``context.normalized``.
    normalizes: ClassVar[bool] = False
    #: Names of an earlier version, without a value: a class may still set them, and the registry says what to write.
    by_block: ClassVar[object]
    by_expert: ClassVar[object]
    divides_by: ClassVar[object]
    #: The plugin that offers the technique, for errors; set by the registry.
    plugin: ClassVar[str | None] = None

    @property
    def complexity(self) -> float:
        """The weight that the technique adds to a policy's Ω (paper Table 9).

        A class declares it as a constant, or as a property if it depends on the options.
        """
        raise NotImplementedError(f"{type(self).__name__} declares no complexity")

    @property
    def group_granularity(self) -> Granularity | None:
        """The elements that share the γ of ``group_scale``; None if there is no γ, or if each call decides."""
        return None

    @property
    def block_rotation(self) -> int | None:
        """The g of a pair transform that is the rotation x·S·H of blocks of g elements; None if it is another.

        S is the diagonal of the one tensor that ``pair_context`` returns, ±1, ``[g]``, or the identity where it returns
        none; H is the orthonormal Sylvester-Hadamard matrix of a power of two g; the product is in fp32, and axes that
        g does not divide are zero-padded. A kernel may then rotate what it reads by itself, and ``transform`` is not
        called. A class that overrides ``transform`` or ``inverse`` must override this too, else it is ignored.
        """
        return None

    @property
    def period(self) -> int:
        """The elements along the contraction axis that are treated together, by a rotation or a γ of so many elements.

        Override it only where a pair transform that is no :attr:`block_rotation` mixes elements along that axis.
        """
        shared = self.group_granularity
        return lcm(self.block_rotation or 1, shared if isinstance(shared, int) else 1)

    @property
    def draws(self) -> bool:
        """True if a tensor stage of this technique uses ``noise``, ``constant`` or ``count`` of its context."""
        return False

    @property
    def draws_in_evaluation(self) -> bool:
        """True if noise that ``after`` adds stays on in evaluation mode; otherwise it is off there."""
        return False

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
