"""What a product shows to code that watches it: both operands of each GEMM, as they were given and as they were
multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from torch import Tensor

from fp4graph.numerics.draw import Draw
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import Terms
from fp4graph.ops.state import OperandState
from fp4graph.technique.operands import Operand


@dataclass(frozen=True, eq=False)
class ObservedOperand:
    """One operand of one GEMM.

    Attributes:
        operand: which of the site's six.
        program: its quantizer.
        given: ``[..., K]``, before casts and pair transforms.
        x: what was quantized, in the GEMM's basis.
        terms: what was multiplied.
        draw, state: what the program was called with.
    """

    operand: Operand
    program: OperandProgram
    given: Tensor
    x: Tensor
    terms: Terms
    draw: Draw | None
    state: OperandState


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
