"""MXFP4 and NVFP4 blocks against torchao, bit for bit on finite data.

For a block with Inf the two differ by design: in some modes torchao's E8M0 scale is finite (2^127 / 2^emax), and
fp4graph's is NaN, as OCP asks.
"""

from __future__ import annotations

import pytest
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

from fp4graph.numerics.packing import pack, unpack
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.helpers.floats import any_floats, blocks_of_every_scale

MODES = {
    "floor": ScaleCalculationMode.FLOOR,
    "ceil": ScaleCalculationMode.RCEIL,
    "amax_ceil": ScaleCalculationMode.CEIL,
    "amax_even": ScaleCalculationMode.EVEN,
}
DTYPES = {"e2m1": torch.float4_e2m1fn_x2, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def data(dtype: torch.dtype) -> torch.Tensor:
    one_exponent = torch.randn(300, 32).exp2() * torch.randint(-100, 100, (300, 1)).float().exp2()
    ties = torch.randint(-60, 60, (300, 32)) * 0.25 * torch.randint(-20, 20, (300, 1)).float().exp2()
    x = torch.cat([one_exponent, ties, any_floats((500, 32)), blocks_of_every_scale(32)]).to(dtype)
    return x[x.isfinite().all(1)].contiguous()


def known_to_differ(x: torch.Tensor, mode: str, qmax: float) -> torch.Tensor:
    """Return which blocks torchao gets wrong, by its own definition of the mode."""
    z = x.float().abs().amax(1)
    if mode == "ceil":
        # Except on sm_100, torchao takes log2 in fp32, which rounds the logarithm of 2^k·(1 + a few ulp) to k.
        ideal = z.double() / qmax
        above = ideal / 2.0 ** ideal.log2().floor()
        # And if the stored scale is 2^127 or 2^-127, torchao divides by another number.
        return ((above > 1) & (above < 1 + 2.0**-15)) | (ideal > 2.0**126) | (ideal <= 2.0**-126)
    # If the exponent less Emax is below the range, torchao stores the scale 2^-127 and divides by 2^-126.
    return z < 2.0**-110


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("element", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_mx_blocks(mode, element, dtype):
    x = data(dtype)
    spec = QuantSpec(element, 32, ScaleSpec("e8m0", mode))
    scale, codes = to_mx(x, DTYPES[element], 32, MODES[mode])
    packed = pack(x, spec)
    keep = ~known_to_differ(x, mode, spec.element.max)
    assert keep.float().mean() > 0.8
    assert torch.equal(packed.scales[keep], scale.view(torch.uint8).reshape(-1, 1)[keep])
    assert torch.equal(packed.codes[keep], codes.view(torch.uint8)[keep])


def test_nvfp4_blocks():
    """torchao raises smaller scales to 2^-6, and multiplies by the rounded reciprocal of the scale.

    So blocks with a smaller scale are not compared. Where x/S is within an ulp of a midpoint, the two may round to
    different neighbours: fewer than one element in a thousand.
    """
    x = torch.randn(4000, 16) * torch.randint(-1, 8, (4000, 1)).float().exp2()
    spec = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"))
    scale, codes = nvfp4_quantize(x)
    packed = pack(x, spec)
    keep = packed.scales[:, 0] >= 1 << 3  # code of 2^-6
    assert keep.float().mean() > 0.9
    assert torch.equal(packed.scales[keep], scale.view(torch.uint8)[keep])
    expected = f4_unpacked_to_f32(unpack_uint4(codes)) * scale.float()
    differing = (expected != unpack(packed))[keep]
    assert differing.float().mean() < 1e-3
    assert ((expected - unpack(packed))[keep].abs() <= 2 * scale.float()[keep]).all()
