"""FP4 weights as a checkpoint's matrices, and as bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fp4graph.exports.names import by_module
from fp4graph.exports.weights import Fp4Weight, refusal
from fp4graph.numerics.formats import E2M1, E8M0
from fp4graph.numerics.packing import element_codes, scale_codes


@dataclass(frozen=True, eq=False)
class Matrix:
    """The matrix ``[N, K]`` of one module: fp32 elements ``[N, K]``, block scales ``[N, K/block]`` and γ, 0-d."""

    elements: Tensor
    scales: Tensor
    multiplier: Tensor


def matrices(model: nn.Module, weight: Fp4Weight) -> dict[str, Matrix]:
    """Return the matrices of ``weight`` by the checkpoint's modules."""
    lines = torch.ones_like(weight.scales[..., :1])
    gamma = weight.multiplier
    gamma = gamma.reshape(*gamma.shape, *([1] * (lines.dim() - gamma.dim()))) * lines
    parts = by_module(model, weight, (weight.elements, weight.scales, gamma))
    return {module: Matrix(elements, scales, each[0, 0].clone()) for module, (elements, scales, each) in parts.items()}


def element_bytes(elements: Tensor) -> Tensor:
    """Return elements ``[..., K]`` as uint8 ``[..., K/2]``, in the order of :func:`nibbles`."""
    return nibbles(element_codes(elements, E2M1))


def nibbles(codes: Tensor) -> Tensor:
    """Return 4-bit codes ``[..., K]`` as uint8 ``[..., K/2]``, two per byte, the first in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def scale_bytes(scales: Tensor) -> Tensor:
    """Return E8M0 scales as uint8 exponents with bias 127."""
    return scale_codes(scales, E8M0)


def require_storable(weight: Fp4Weight) -> None:
    """Raise an ExportError if the format cannot store the block scales or the tensor scale that techniques chose."""
    if weight.scheme.weights == "nvfp4":
        stored = weight.scales.to(torch.float8_e4m3fn).to(torch.float32)
    else:
        stored = torch.ldexp(torch.ones_like(weight.scales), scale_bytes(weight.scales).to(torch.int32) - 127)
        if (weight.multiplier != 1).any():
            raise refusal(
                weight,
                "it has a tensor scale, which MXFP4 does not have",
                "leave fprop.weight out of the operands of tensor_scaling",
            )
    if not torch.equal(stored, weight.scales):
        raise refusal(
            weight,
            "a technique gives it block scales that the format cannot store",
            "export under a policy without the technique",
        )
