"""Packs a quantized tensor into the bytes of its codes, and unpacks them to exactly the result of fake_quantize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4graph.errors import SpecError
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.formats import ElementFormat, ScaleFormat
from fp4graph.numerics.quantize import quantize
from fp4graph.numerics.scaling import dequantize
from fp4graph.numerics.spec import QuantSpec


@dataclass(frozen=True, eq=False)
class Packed:
    """A quantized tensor as it would lie in memory.

    Attributes:
        codes: uint8, the contraction axis last and padded to whole blocks (and whole bytes). A byte holds two 4-bit
            codes, the first in the low nibble, or one wider code. A float's code is sign|exponent|mantissa, an
            integer's is two's complement.
        scales: one per block, with as many axes as the tensor, the contraction axis last: uint8 codes for formats of
            up to 8 bits, bfloat16 for bf16 and for e8m3 (a subset of bf16), float32 for fp32. A poisoned block has
            the NaN of the format.
        spec, shape, dim, dtype: the tensor's spec, shape, contraction axis and dtype before it was packed.
    """

    codes: Tensor
    scales: Tensor
    spec: QuantSpec
    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


def pack(x: Tensor, spec: QuantSpec, dim: int = -1, key: int | Tensor | None = None) -> Packed:
    """Quantize ``x`` to bytes, with the arguments and the errors of :func:`fake_quantize`.

    Raises:
        SpecError: blocks choose between element formats, a choice that codes and scales do not show.
    """
    if isinstance(spec, QuantSpec) and spec.others:
        raise SpecError(
            f"blocks that choose between elements ({spec.element_name}) cannot be packed: codes and scales do not say "
            "which element a block took; name one element, or keep the result of fake_quantize"
        )
    blocking, values, scale = quantize(x, spec, dim, key)
    codes = element_codes(values, spec.element).reshape(blocking.padded_shape).movedim(dim, -1)
    if spec.element.code_bits == 4:
        codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    scales = scale_codes(scale, spec.scale.format).reshape(blocking.grid).movedim(dim, -1)
    return Packed(codes.contiguous(), scales.contiguous(), spec, tuple(x.shape), dim, x.dtype)


def unpack(packed: Packed) -> Tensor:
    """Return the tensor that ``packed`` represents: bit for bit ``fake_quantize(x, spec, dim, key)``."""
    spec, dim = packed.spec, packed.dim
    blocking = Blocking(packed.shape, spec.block, dim)
    codes = packed.codes
    if spec.element.code_bits == 4:
        codes = torch.stack([codes & 0xF, codes >> 4], -1).flatten(-2)
        codes = codes.narrow(-1, 0, blocking.padded_shape[dim])
    values = _decode_elements(codes, spec.element).movedim(-1, dim).reshape(blocking.layout)
    scale = _decode_scales(packed.scales, spec.scale.format).movedim(-1, dim).reshape(blocking.scale_shape)
    return blocking.join(dequantize(values, scale, spec).to(packed.dtype))


def empty_bytes(like: Tensor, shape: Sequence[int | torch.SymInt], spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return empty codes and scales of a tensor of ``shape``, as :func:`pack` lays them out, on the device of ``like``.

    Args:
        shape: ``[..., C]``, blocks along C.
        spec: its block has a fixed, even length.
    """
    assert isinstance(spec.block, int)
    *lines, length = shape
    blocks = (length + spec.block - 1) // spec.block
    width = spec.block // 2 if spec.element.code_bits == 4 else spec.block
    codes = like.new_empty((*lines, blocks * width), dtype=torch.uint8)
    return codes, like.new_empty((*lines, blocks), dtype=scale_storage(spec.scale.format))


def element_codes(values: Tensor, element: ElementFormat) -> Tensor:
    """Return the codes, uint8, of values of ``element``. NaN, as in poisoned blocks, gives the NaN code, or else 0."""
    # The code of a magnitude is its index among the ascending magnitudes.
    magnitudes = torch.tensor(element.magnitudes(), dtype=torch.float32, device=values.device)
    code = torch.searchsorted(magnitudes, values.abs().contiguous(), out_int32=True)
    if element.integer:
        code = torch.where(values < 0, -code, code) & ((1 << element.code_bits) - 1)
    else:
        code = code | (torch.signbit(values).to(torch.int32) << (element.code_bits - 1))
    return torch.where(values.isnan(), element.nan_code or 0, code).to(torch.uint8)


def _decode_elements(codes: Tensor, element: ElementFormat) -> Tensor:
    """Return the values, fp32, of uint8 codes."""
    half = 1 << (element.code_bits - 1)
    positive = [*element.magnitudes(), *[torch.nan] * half][:half]
    if element.integer:
        negative = [-float(half) * positive[1], *(-value for value in reversed(positive[1:]))]
    else:
        negative = [-value for value in positive]
    return torch.tensor([*positive, *negative], dtype=torch.float32, device=codes.device)[codes.int()]


def scale_storage(scale_format: ScaleFormat) -> torch.dtype:
    """Return the dtype in which scales of a format are stored: uint8 for codes, else the shortest float that fits."""
    if scale_format.code_bits <= 8 and scale_format.nan_code is not None:
        return torch.uint8
    return torch.bfloat16 if scale_format.mantissa_bits <= 7 else torch.float32


def scale_codes(scale: Tensor, scale_format: ScaleFormat) -> Tensor:
    storage = scale_storage(scale_format)
    if storage is not torch.uint8:
        return scale.to(storage)
    values = torch.tensor(scale_format.values(), dtype=torch.float32, device=scale.device)
    code = torch.searchsorted(values, scale.contiguous(), out_int32=True)
    return torch.where(scale.isnan(), scale_format.nan_code or 0, code).to(torch.uint8)


def _decode_scales(scales: Tensor, scale_format: ScaleFormat) -> Tensor:
    if scale_storage(scale_format) is not torch.uint8:
        return scales.to(torch.float32)
    values = scale_format.values()
    table = torch.tensor([*values, *[torch.nan] * (256 - len(values))], dtype=torch.float32, device=scales.device)
    return table[scales.int()]
