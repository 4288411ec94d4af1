"""A trial run of the Triton kernels before they are used: an installed Triton may be unable to compile them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from fp4graph.kernels.direction import Direction, Packed, Source
from fp4graph.numerics import noise
from fp4graph.numerics.formats import E2M1, E4M3, E8M0
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec, ScaleSpec

_ROWS = QuantSpec(E2M1, 32, ScaleSpec(E8M0, "ceil"))
_COLUMNS = QuantSpec(E2M1, 16, ScaleSpec(E4M3))


def failure(device: torch.device) -> str | None:
    """Compile the kernels, run them on small tensors, and return why they cannot be used on ``device``, or None.

    If a compiler is tracing the caller, the trial runs outside of the trace.
    """
    with _disable_current_modes(), torch.no_grad():
        try:
            from fp4graph.kernels import triton_product, triton_quantize

            x = _numbers(device)
            source, directions = Source(x.chunk(2, -1), x.dtype), (Direction(_ROWS), Direction(_COLUMNS))
            y, codes, scales = triton_quantize.quantize_and_pack_columns(source, *directions)
            unpacked = triton_quantize.unpack(Packed(codes, scales, _COLUMNS, x.shape[0], x.dtype))
            same = torch.equal(y, fake_quantize(x, _ROWS)) and torch.equal(unpacked.mT, fake_quantize(x, _COLUMNS, 0))
            left, half = _whole_numbers(x), x.new_tensor(0.5)
            product = triton_product.scaled_product(left, left, half, None, 0)
            same = same and torch.equal(product, (left.float() @ left.float().mT * 0.5).bfloat16())
        except Exception as error:  # noqa: BLE001  # Triton, drivers and linkers raise many types
            said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
            return f"Triton cannot compile or run them: {type(error).__name__}{': ' if said else ''}{said[:200]}"
    return None if same else "a trial gave other values than tensor code"


def _numbers(device: torch.device) -> Tensor:
    """Return numbers of many magnitudes, fp32 ``[96, 80]``. No length is a multiple of the tile's 64."""
    index = torch.arange(96 * 80, device=device, dtype=torch.int32)
    bits: Tensor = noise.hash_bits(noise.make_key("trial", device=device), index)
    powers = ((bits >> 20 & 15) + 119 << 23).view(torch.float32)  # 2^-8 to 2^7
    return (((bits & 0xFFFF).to(torch.float32) - 2**15) * powers).reshape(96, 80)


def _whole_numbers(x: Tensor) -> Tensor:
    """Return small whole numbers, bf16, in the shape of ``x``. Sums of their products are exact in fp32."""
    return (x.view(torch.int32) >> 19 & 15).to(torch.bfloat16) - 8
