"""The error of quantizing a tensor, without a model: by block size, tensor scale, softmax temperature.

The experiments of "Elucidating the design space of FP4 training", A.12 (Figures 11 to 15), and its Figures 1 and 2:
surrogates of the element quantizer, and what scale formats do to a scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4graph.kernels import operators
from fp4graph.numerics import scaling, surrogates
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.formats import E2M1, SCALES
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.rounding import bracket, round_nearest
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.technique import Context
from fp4graph.technique.registry import default_registry

#: The scale formats of the paper, and no rounding of scales.
FORMATS = ("e8m0", "e4m3", "ue5m3", "e8m3", "fp32")
BLOCKS = (4, 8, 16, 32, 64, 128, 256)
TENSOR_SCALES = tuple(10.0**exponent for exponent in range(-8, 7))
BETAS = (1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)


class RelativeError(NamedTuple):
    """The relative errors of a quantized tensor.

    ``elementwise`` is the paper's relative error (A.12), the mean of abs(Q(x) − x)/abs(x) over elements that are not
    zero; ``normwise`` is ‖Q(x) − x‖/‖x‖, to which small elements contribute little.
    """

    elementwise: float
    normwise: float


def reconstruction_error(x: Tensor, spec: QuantSpec, beta: float | None = None) -> RelativeError:
    """Return the relative errors of Q(x), blocks along the last axis.

    Args:
        x: floating point, converted to fp32.
        beta: makes the block statistic Z = log(Σ exp(β·abs(x)))/β in place of the maximum.
    """
    smooth_max: Any = default_registry().techniques["smooth_max"]
    soft = () if beta is None else (smooth_max(kind="softmax", beta=beta),)
    x = x.to(torch.float32)
    with operators.tensor_code():  # a kernel would be compiled for every point of a curve
        error = (total(OperandProgram(spec, soft)(x)).double() - x.double()).abs()
    size = x.double().abs()
    nonzero = size > 0
    return RelativeError((error[nonzero] / size[nonzero]).mean().item(), (error.norm() / size.norm()).item())


def e2m1_error(
    x: Tensor, scale: str, *, block: int = 16, tensor_scale: float = 1.0, beta: float | None = None
) -> RelativeError:
    """Return the errors of ``tensor_scale``·x in E2M1, its encode scales Qmax/Z rounded to nearest as in the paper."""
    spec = QuantSpec(E2M1, block, ScaleSpec(SCALES[scale], "nearest_even", "encode"))
    return reconstruction_error(x * tensor_scale, spec, beta)


def gaussian(lines: int = 512, length: int = 1024, seed: int = 0) -> Tensor:
    """Return independent standard normal numbers, fp32 ``[lines, length]``."""
    return torch.randn(lines, length, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ Figures 1 and 2


def quantized_scales(name: str, scale: Tensor) -> Tensor:
    """Return s_q, the positive scales s rounded to a format, to nearest even; fp32. Figure 2 shows s_q and s/s_q."""
    qmax = torch.tensor(E2M1.max)
    return scaling.block_scale(scale.to(torch.float32) * qmax, ScaleSpec(SCALES[name], "nearest_even"), E2M1)


def relaxations(u: Tensor) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """Yield (name, surrogate of Q(u), its slope, its clipped slope) of Figure 1 on E2M1, fp32, for ``u`` from 0 to 6.

    The surrogates are rounding with the straight-through slope, the linear spline, DGE (k = 5), and the sigmoid of A.13
    (T = 1). Each is the integral of its slope. DGE's slope is infinite at the thresholds. ``step_gradient``'s defaults
    clip the spline's slope from below at 0.2 and DGE's from above at 3.
    """
    yield "rounding, slope STE", round_nearest(u, E2M1), torch.ones_like(u), torch.ones_like(u)
    spline = surrogates.spline(u, surrogates.ties_even_knots(E2M1))
    yield "spline", _integral(spline, u), spline, _clipped(u, "spline")
    lower, upper = bracket(u, E2M1)
    part, gap = surrogates.fraction(u, E2M1), upper - lower
    side = 2 * part - 1
    dge = lower + gap * (1 + side.sign() * side.abs() ** 0.2) / 2
    yield "DGE, k = 5", dge, surrogates.dge(part, 5.0), _clipped(u, "dge")
    sigmoid = surrogates.sigmoid(part, 1.0)
    yield "sigmoid, T = 1", _integral(sigmoid, u), sigmoid, _clipped(u, "sigmoid")


def _clipped(u: Tensor, kind: str) -> Tensor:
    blocking = Blocking((len(u),), "tensor")
    context = Context(blocking, Noise(None, blocking, u.device), Noise(None, blocking, u.device), spec=QuantSpec(E2M1))
    technique: Any = default_registry().techniques["step_gradient"]
    slope: Tensor = technique(kind=kind).element_surrogate(u, context)
    return slope


def _integral(slope: Tensor, u: Tensor) -> Tensor:
    areas = torch.cumulative_trapezoid(slope.double(), u.double())
    return torch.cat([areas.new_zeros(1), areas]).float()
