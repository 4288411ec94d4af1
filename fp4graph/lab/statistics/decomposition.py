"""The error of a quantizer, relative to its input, or in parts: scale bias, dead zone, grid noise."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fp4graph.errors import Error
from fp4graph.kernels import operators
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.ops.state import OperandState
from fp4graph.technique import parts_of
from fp4graph.technique.registry import default_registry

#: Total, scale bias, dead zone and grid noise.
Parts = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Decomposition:
    """The error Q(x) − x of every element as a sum of three terms, all float64 in the shape of x.

    S is the stored scale of the element's block, and S* = Z/Qmax (or its reciprocal) the scale before rounding:

    - dead zone: the error −x of an element that rounds to zero, Q_S(x) = 0; the other two terms are 0 there;
    - grid noise, elsewhere: Q_S*(x) − x, the cost of 4 bits under an ideal scale;
    - scale bias, elsewhere: Q_S(x) − Q_S*(x), the cost of the scale's format.

    ``scale_bias + grid_noise + dead_zone == total`` exactly: values that differ by a factor of 2^27 or more are first
    rounded to 2^-51 of the largest. Blocks with NaN or Inf are NaN in every term.

    The terms come from "Decomposing MXFP4 quantization error for LLM reinforcement learning"; the definition above
    (``ideal``) is this project's. By the rebuttal's formula (``printed``) the scale bias is (S − S*)·x/S, and the
    remaining error is dead zone where Q_S(x) = 0, else grid noise; these terms add up within float64's rounding.
    """

    total: Tensor
    scale_bias: Tensor
    dead_zone: Tensor
    grid_noise: Tensor

    def shares(self, x: Tensor) -> dict[str, float]:
        """Return the squared norms of the total and of each term, by name, over the squared norm of ``x``."""
        signal = x.double().square().sum()
        return {name: (term.square().sum() / signal).item() for name, term in vars(self).items()}


def decompose(
    x: Tensor,
    quantizer: QuantSpec | OperandProgram,
    dim: int = -1,
    key: int = 0,
    *,
    draw: Draw | None = None,
    state: OperandState | None = None,
    definition: Literal["ideal", "printed"] = "ideal",
) -> Decomposition:
    """Return the three parts of a quantizer's error on ``x``, which has any shape and is first rounded to fp32.

    Args:
        quantizer: a spec, or an operand's program; Q_S* does not round the scales in any of the program's passes.
        dim: the contraction axis, along which blocks run.
        key: seeds the random bits, the same for Q_S and Q_S*; inside a model, ``draw`` and ``state`` replace it.
        definition: the definition of the three terms, see :class:`Decomposition`. ``printed`` raises an Error for a
            program that quantizes twice or changes the quantizer's result.
    """
    if definition not in ("ideal", "printed"):
        raise Error(f"definition must be ideal or printed; got {definition!r}")
    program = quantizer if isinstance(quantizer, OperandProgram) else OperandProgram(quantizer)
    if draw is None and program.draws:
        draw = Draw(noise.make_key(key, device=x.device), noise.make_step(0, 0, 0, device=x.device))
    x = x.detach().to(torch.float32).movedim(dim, -1)
    with operators.tensor_code():  # else a kernel would be compiled for each of the two programs
        if definition == "printed":
            parts = _printed(program, x, draw, state)
        else:
            outcomes = [total(each(x, draw, state)) for each in (program, with_ideal_scales(program))]
            parts = split_error(*_aligned(*(each.double() for each in (x, *outcomes))))
    return Decomposition(*(part.movedim(-1, dim) for part in parts))


def _printed(program: OperandProgram, x: Tensor, draw: Draw | None, state: OperandState | None) -> Parts:
    """Return the parts by the paper's formula, float64."""
    for technique in (t for stage in ("split", "around", "after") for t in program.at(stage)):
        raise Error(f"the printed decomposition needs a single quantization with one scale, unlike {technique.name}; "
                    "use definition='ideal'")  # fmt: skip
    parts = program.quantize(x, draw, state)
    spec, join = parts.spec, parts.blocking.join
    stored = parts.scale.double() if spec.scale.convention == "decode" else 1 / parts.scale.double()
    unrounded = parts.z.double() / spec.element.max  # in the same units: both include γ
    quantized = parts.dequantized().double() * (1 if parts.group_scale is None else parts.group_scale.double())
    error = join(quantized) - x.double()
    scale_bias = join((1 - unrounded / stored).expand(parts.ratio.shape)) * x.double()
    remainder = error - scale_bias
    alive = join(parts.elements) != 0
    return error, scale_bias, remainder * ~alive, remainder * alive  # NaN in both


def _aligned(x: Tensor, quantized: Tensor, ideal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round float64 numbers to multiples of 2^-51 of the largest of the three, so that differences and sums are exact.

    24-bit numbers that differ by a factor below 2^27 are such multiples already.
    """
    ideal = torch.where(quantized == 0, 0.0, ideal)  # not used in the dead zone
    largest = torch.stack([x, quantized, ideal]).abs().amax(0)
    # The middle of a binade whose last place is the unit; adding and subtracting it rounds to the unit.
    middle = torch.ldexp(torch.full_like(x, 3.0), torch.frexp(largest).exponent)
    return x + middle - middle, quantized + middle - middle, ideal + middle - middle


def split_error(x: Tensor, quantized: Tensor, ideal: Tensor) -> Parts:
    """Return the parts, in the arguments' common dtype; ``ideal`` is Q_S*(x)."""
    # Products with 0 and 1 are many times faster than comparisons and torch.where.
    alive = quantized.sign().abs_()
    error = quantized - x
    of_alive = error * alive
    grid_noise = (ideal - x).mul_(alive)
    return error, of_alive - grid_noise, error - of_alive, grid_noise


def with_ideal_scales(program: OperandProgram) -> OperandProgram:
    """Return ``program`` with the scale S* in fp32: Z/Qmax for decode scales, Qmax/Z for encode scales."""
    spec = program.spec
    assert spec is not None, "a high-precision operand has no error"
    scale = ScaleSpec("fp32", rounding="nearest_even", convention=spec.scale.convention)  # type: ignore[arg-type]
    return dataclasses.replace(program, spec=dataclasses.replace(spec, scale=scale))


class RelativeError(NamedTuple):
    """The mean of abs(Q(x) − x)/abs(x) over elements that are not zero, and ‖Q(x) − x‖/‖x‖.

    ``elementwise`` is the relative error of "Elucidating the design space of FP4 training", A.12. Small elements
    contribute little to ``normwise``.
    """

    elementwise: float
    normwise: float


def reconstruction_error(x: Tensor, spec: QuantSpec, beta: float | None = None) -> RelativeError:
    """Return the relative errors of Q(x), with blocks along the last axis; ``x`` is first rounded to fp32.

    ``beta`` replaces the maximum by the block statistic Z = log(Σ exp(β·abs(x)))/β.
    """
    smooth_max: Any = default_registry().techniques["smooth_max"]
    program = OperandProgram(spec, () if beta is None else parts_of(smooth_max(kind="softmax", beta=beta)))
    x = x.to(torch.float32)
    with operators.tensor_code():  # else a kernel would be compiled for every point of a curve
        error = (total(program(x)).double() - x.double()).abs()
    size = x.double().abs()
    nonzero = size > 0
    return RelativeError((error[nonzero] / size[nonzero]).mean().item(), (error.norm() / size.norm()).item())
