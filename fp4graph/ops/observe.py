"""Observers of products, which see both operands of each GEMM before and after quantizing."""

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
    """One operand of a GEMM: its program and the arguments of its call, with ``x`` in the GEMM's basis and layout.

    Attributes:
        turn: the rotation by which a kernel brings ``x`` into the GEMM's basis; None if ``x`` is in that basis.
        code: the kernels that give the operand's values; None if the schedule names none.
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
    """An operand as an observer sees it.

    Attributes:
        given: the operand before casts and pair transforms, ``[..., K]``.
        terms: the quantized operand, as the GEMM multiplied it.
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
    """Show ``observer`` the operands of all products in this context, and of their backwards whenever these run."""
    token = _current.set(observer)
    try:
        yield
    finally:
        _current.reset(token)
