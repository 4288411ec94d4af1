"""The error of quantizing a tensor, without a model, as in "Elucidating the design space of FP4 training", A.12."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fp4graph.kernels import operators
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.technique.registry import default_registry


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
