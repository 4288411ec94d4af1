"""The data that techniques declare: their cost, the tensors that they keep, the channels that they split off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from fp4graph.numerics.spec import QuantSpec
from fp4graph.technique.operands import GROUPS, Operand

if TYPE_CHECKING:
    from torch import Tensor

#: Specs of one site's six operands; None is high precision.
OperandSpecs = Mapping[Operand, "QuantSpec | None"]
#: The elements that may change what a technique does to an element of the same operand; each includes the ones before.
Mixes = Literal["none", "block", "expert", "tensor"]
#: The sides that may change an entry of state.
Writer = Literal["optimizer", "graph", "siblings"]


@dataclass(frozen=True)
class Overhead:
    """The cost on n elements in blocks of l, as in Table 2 of "Elucidating the Design Space of FP4 Training"."""

    compute: str
    memory: str
    fusable: bool


@dataclass(frozen=True)
class StateEntry:
    """A tensor that a technique keeps in the model for each weight it acts on, as a buffer of the weight's module.

    Parts that act on ``operand`` read the entry as ``context.state[name]``, a ``weight_like`` one as they get the
    operand: transposed, rotated and cut into blocks. Hooks read it in ``WeightUpdate.state``, in the layout in which
    the module stores its weight: ``[K, N]`` for Hugging Face's Conv1D, ``[N, K]`` otherwise; under FSDP2 as a DTensor,
    sharded like the weight, if it is ``weight_like``. Floating-point buffers keep their dtype whatever ``model.to``
    says. A tensor that only the optimizer's stages read belongs into ``WeightUpdate.memory``.

    Attributes:
        name: the name of the entry; the buffer's name begins with the technique's (and the operand's, unless that is
            ``fprop.weight``).
        operand: the operand whose stages receive the entry.
        init: makes the first value from the whole weight, as stored: in ``apply``, again at the first training forward,
            and when a checkpoint lacks the entry. It must be a function of a module, not a lambda or a closure, because
            a new function at each call of ``parts`` would prevent shared compiled code.
        writer: the side that changes the entry: the ``optimizer``'s step, or the ``graph`` by the part's ``observe``.
            With ``siblings`` the entry is not kept: before each forward it becomes the maximum of ``init`` over this
            weight and those that servers fuse with it (q, k, v; gate, up). Such an ``init`` must itself be a maximum
            over elements, because a sharded weight takes the maximum over its shards.
        weight_like: whether the entry has the weight's shape. The stages get other entries as they are stored.
        canonical: whether ``init`` takes and returns ``[..., N, K]``, contraction axis last, in place of the stored
            layout; only for a ``weight_like`` entry.
        families: groups of last names of modules with one parent that are siblings too, beside those that servers fuse.
    """

    name: str
    operand: Operand
    init: Callable[[Tensor], Tensor]
    writer: Writer = "optimizer"
    weight_like: bool = True
    canonical: bool = False
    families: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        """Raise TypeError for a field of another type, and for fields that contradict one another."""
        for holds, rule in (
            (isinstance(self.name, str) and self.name.isidentifier(), "the name must be a Python identifier"),
            (isinstance(self.operand, Operand), f"operand must be an Operand; got {self.operand!r}"),
            (callable(self.init), "init must be a function of the weight"),
            (self.writer in get_args(Writer), f"writer must be one of {', '.join(get_args(Writer))}"),
            (not self.weight_like or self.operand in GROUPS["weights"], "give weight_like=False beside an activation"),
            (self.weight_like or not self.canonical, "canonical needs weight_like=True"),
        ):
            if not holds:
                raise TypeError(f"state {self.name!r}: {rule}")


@dataclass(frozen=True)
class Partition:
    """Input channels that a linear layer multiplies apart from its others, under specs of their own.

    X and W are cut along K into the channels C of the largest scores and the rest R. Each part is gathered by falling
    score; of equal scores the first channel comes first::

        fprop   Y       = Q1(X_R) @ Q2(W_R)ᵀ + C1(X_C) @ C2(W_C)ᵀ
        dgrad   dX      = Q3(dY) @ Q4(Wᵀ)ᵀ
        wgrad   dW_R    = Q5(dYᵀ) @ Q6(X_Rᵀ)ᵀ,   dW_C = C5(dYᵀ) @ C6(X_Cᵀ)ᵀ

    Q are the site's quantizers, with its techniques; C are plain quantizers by :attr:`specs`. dgrad is one product in
    the layer's own order of channels; with ``source: fprop`` it reads what Q2 and C2 gave.

    Attributes:
        entry: the name of the technique's :class:`StateEntry` with the scores, fp32 ``[K]``: an entry of
            ``fprop.weight`` that is not ``weight_like``.
        count: the number of chosen channels, from 1 to K - 1.
        specs: the specs of the chosen channels in fprop and wgrad, None or absent for high precision.
    """

    entry: str
    count: int
    specs: tuple[tuple[Operand, QuantSpec | None], ...]

    def __post_init__(self) -> None:
        """Raise TypeError unless ``count`` is a whole number, and ``specs`` pairs of an operand and a spec or None."""
        try:
            pairs = dict(self.specs).items()
            fits = all(isinstance(operand, Operand) and isinstance(spec, QuantSpec | None) for operand, spec in pairs)
        except (TypeError, ValueError):  # a ValueError would refuse the site
            fits = False
        if not fits:
            raise TypeError(f"specs must be pairs (Operand, QuantSpec or None); got {self.specs!r}")
        if not isinstance(self.count, int):
            raise TypeError(f"count must be a whole number of channels; got {self.count!r}")
