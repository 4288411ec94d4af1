"""Observers of products: they are shown both operands of each GEMM, as given and as multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp4graph.numerics.draw import Draw
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.segments import Segments
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Terms
from fp4graph.ops.schedule import Code
from fp4graph.ops.state import OperandState
from fp4graph.technique.operands import Operand


@dataclass(frozen=True, eq=False)
class BoundOperand:
    """One operand of a GEMM: its program and what the program is called on, ``x`` in the GEMM's basis and layout.

    Attributes:
        turn: brings ``x`` into the GEMM's basis, where a kernel is to do that; else None.
        code: the kernels of its values; None in high precision, and where values are never asked for.
    """

    operand: Operand
    program: OperandProgram
    x: Tensor
    draw: Draw | None
    state: OperandState
    segments: Segments | None = None
    turn: BlockRotation | None = None
    code: Code | None = None

    def quantized(self, dtype: torch.dtype) -> Terms:
        """Return the quantized operand in the dtype of the GEMM."""
        terms = self.program(self.x, self.draw, self.state, self.segments, dtype, self.code)
        return tuple(term.to(dtype) for term in terms)


@dataclass(frozen=True, eq=False)
class ObservedOperand(BoundOperand):
    """An operand as an observer is shown it.

    Attributes:
        given: ``[..., K]``, before casts and pair transforms.
        terms: what was multiplied.
    """

    given: Tensor = field(kw_only=True)
    terms: Terms = field(kw_only=True)


#: Called with the left and the right operand of a GEMM.
OperandObserver = Callable[[ObservedOperand, ObservedOperand], None]
_current: ContextVar[OperandObserver | None] = ContextVar("fp4graph_operand_observer", default=None)


def current() -> OperandObserver | None:
    """Return the observer of this context, or None."""
    return _current.get()


@contextmanager
def observed(observer: OperandObserver | None) -> Iterator[None]:
    """Show ``observer`` what the products of this context multiply, in their backwards too, whenever those run."""
    token = _current.set(observer)
    try:
        yield
    finally:
        _current.reset(token)
