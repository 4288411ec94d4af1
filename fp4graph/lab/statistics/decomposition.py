"""The error of a quantizer, relative to what it quantizes, or in parts: scale bias, dead zone, grid noise."""

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

    ``scale_bias + grid_noise + dead_zone == total`` without any rounding: where the values lie 2^27 and more apart,
    they are first rounded to 2^-51 of the largest. Blocks with NaN or Inf are NaN in every term.

    The terms are those of "Decomposing MXFP4 quantization error for LLM reinforcement learning", as we define them
    (``ideal``). By the rebuttal's formula (``printed``) the scale bias is (S − S*)·x/S, and the other error is dead
    zone where Q_S(x) = 0, else grid noise; these add up to float64's rounding.
    """

    total: Tensor
    scale_bias: Tensor
    dead_zone: Tensor
    grid_noise: Tensor

    def shares(self, x: Tensor) -> dict[str, float]:
        """Return the squared norm of the total and of each term, by name, as shares of that of ``x``."""
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
    """Return the three parts of a quantizer's error on ``x``, floating point of any shape, rounded to fp32 first.

    Args:
        quantizer: a spec, or an operand's whole program: Q_S* leaves out the rounding of scales in every pass of it.
        dim: the contraction axis, which blocks run along.
        key: of the random bits, which both quantizations share; inside a model ``draw`` and ``state`` take its place.
        definition: of the three terms, see :class:`Decomposition`. ``printed`` raises an Error for a program without
            one scale, which quantizes twice or changes the result.
    """
    if definition not in ("ideal", "printed"):
        raise Error(f"definition must be ideal or printed; got {definition!r}")
    program = quantizer if isinstance(quantizer, OperandProgram) else OperandProgram(quantizer)
    if draw is None and program.draws:
        draw = Draw(noise.make_key(key, device=x.device), noise.make_step(0, 0, 0, device=x.device))
    x = x.detach().to(torch.float32).movedim(dim, -1)
    with operators.tensor_code():  # a kernel would be compiled for each of the two
        if definition == "printed":
            parts = _printed(program, x, draw, state)
        else:
            outcomes = [total(each(x, draw, state)) for each in (program, with_ideal_scales(program))]
            parts = split_error(*_aligned(*(each.double() for each in (x, *outcomes))))
    return Decomposition(*(part.movedim(-1, dim) for part in parts))


def _printed(program: OperandProgram, x: Tensor, draw: Draw | None, state: OperandState | None) -> Parts:
    """Return the parts by the paper's formula, float64."""
    for technique in (t for stage in ("split", "around", "after") for t in program.at(stage)):
        raise Error(f"the printed decomposition is of one quantization with one scale, and {technique.name} makes more "
                    "of it; use definition='ideal'")  # fmt: skip
    parts = program.quantize(x, draw, state)
    spec, join = parts.spec, parts.blocking.join
    stored = parts.scale.double() if spec.scale.convention == "decode" else 1 / parts.scale.double()
    true = parts.z.double() / spec.element.max  # before rounding, in the same units: γ is in both
    quantized = parts.dequantized().double() * (1 if parts.group_scale is None else parts.group_scale.double())
    error = join(quantized) - x.double()
    scale_bias = join((1 - true / stored).expand(parts.ratio.shape)) * x.double()
    rest = error - scale_bias
    alive = join(parts.elements) != 0
    return error, scale_bias, rest.masked_fill(alive, 0.0), rest.masked_fill(~alive, 0.0)


def _aligned(x: Tensor, quantized: Tensor, ideal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round float64 numbers to multiples of 2^-51 of the largest of the three, so that differences and sums are exact.

    Numbers of 24 bits less than 2^27 apart are such multiples.
    """
    ideal = torch.where(quantized == 0, 0.0, ideal)  # takes no part there
    largest = torch.stack([x, quantized, ideal]).abs().amax(0)
    # In the middle of a binade whose last place is the unit; adding and subtracting it rounds to the unit.
    middle = torch.ldexp(torch.full_like(x, 3.0), torch.frexp(largest).exponent)
    return x + middle - middle, quantized + middle - middle, ideal + middle - middle


def split_error(x: Tensor, quantized: Tensor, ideal: Tensor) -> Parts:
    """Return the parts in the dtype of all three; ``ideal`` is Q_S*(x)."""
    # Products with 0 and 1, many times faster than comparisons and choices.
    alive = quantized.sign().abs_()
    error = quantized - x
    of_alive = error * alive
    grid_noise = (ideal - x).mul_(alive)
    return error, of_alive - grid_noise, error - of_alive, grid_noise


def with_ideal_scales(program: OperandProgram) -> OperandProgram:
    """Return ``program`` with the scale S* = Z/Qmax in fp32, or Qmax/Z by its convention."""
    spec = program.spec
    assert spec is not None, "a high-precision operand has no error"
    scale = ScaleSpec("fp32", rounding="nearest_even", convention=spec.scale.convention)  # type: ignore[arg-type]
    return dataclasses.replace(program, spec=dataclasses.replace(spec, scale=scale))


class RelativeError(NamedTuple):
    """The mean of abs(Q(x) − x)/abs(x) over elements that are not zero, and ‖Q(x) − x‖/‖x‖.

    ``elementwise`` is the relative error of "Elucidating the design space of FP4 training", A.12; to ``normwise`` small
    elements contribute little.
    """

    elementwise: float
    normwise: float


def reconstruction_error(x: Tensor, spec: QuantSpec, beta: float | None = None) -> RelativeError:
    """Return the relative errors of Q(x), blocks along the last axis; ``x`` is rounded to fp32 first.

    ``beta`` makes the block statistic Z = log(Σ exp(β·abs(x)))/β in place of the maximum.
    """
    smooth_max: Any = default_registry().techniques["smooth_max"]
    program = OperandProgram(spec, () if beta is None else (smooth_max(kind="softmax", beta=beta),))
    x = x.to(torch.float32)
    with operators.tensor_code():  # a kernel would be compiled for every point of a curve
        error = (total(program(x)).double() - x.double()).abs()
    size = x.double().abs()
    nonzero = size > 0
    return RelativeError((error[nonzero] / size[nonzero]).mean().item(), (error.norm() / size.norm()).item())
