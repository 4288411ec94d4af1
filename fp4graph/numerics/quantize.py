"""Quantize and dequantize one tensor: the composition of the numerics."""

from __future__ import annotations

import torch
from torch import Tensor

from fp4graph.errors import SpecError
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.noise import Noise, make_key
from fp4graph.numerics.rounding import round_nearest, round_stochastic
from fp4graph.numerics.scaling import amax, block_scale, dequantize, ratio
from fp4graph.numerics.spec import QuantSpec


def fake_quantize(x: Tensor, spec: QuantSpec, dim: int = -1, key: int | Tensor | None = None) -> Tensor:
    """Return ``x`` rounded to the values that ``spec`` can represent, in the shape and dtype of ``x``.

    Computed in fp32, to which float64 is rounded first. A block that holds NaN or Inf becomes NaN (OCP's poisoned
    block), a block of zeros stays zero, and a value beyond the range of the dtype becomes Inf, as in any cast (the
    block's maximum may be rounded up past it).

    Args:
        x: floating point, at least one axis, any strides.
        dim: the contraction axis, which blocks run along.
        key: the key of the random bits, if ``spec`` needs any: an int, or an int32 ``[2]`` tensor.

    Raises:
        TypeError: ``x`` is not floating point, or ``spec`` is not a :class:`QuantSpec` (a :class:`fp4graph.SpecError`).
        ValueError: ``spec`` needs random bits and there is no key, or ``x`` has too few axes for the block.
    """
    blocking, codes, scale = quantize(x, spec, dim, key)
    return blocking.join(dequantize(codes, scale, spec).to(x.dtype))


def quantize(
    x: Tensor, spec: QuantSpec, dim: int = -1, key: int | Tensor | None = None
) -> tuple[Blocking, Tensor, Tensor]:
    """Return the parts of :func:`fake_quantize`: the blocking, element values and scales, fp32, in its layout."""
    if not isinstance(spec, QuantSpec):
        raise SpecError(f"spec must be a QuantSpec, such as QuantSpec('e2m1', 32); got {type(spec).__name__}")
    if not x.is_floating_point():
        raise TypeError(f"only floating-point tensors can be quantized; got {x.dtype}")
    blocking = Blocking(tuple(x.shape), spec.block, dim)
    if isinstance(key, int):
        key = make_key(key, device=x.device)
    elif key is not None and (key.dtype is not torch.int32 or key.shape != (2,)):
        raise ValueError(f"a key is an int32 tensor of two elements; got {key.dtype} {list(key.shape)}")
    noise = Noise(key, blocking, x.device)
    if spec.needs_key and noise.key is None:
        raise ValueError("this spec rounds stochastically: pass a key (an int or a tensor from make_key)")
    values = blocking.split(x).to(torch.float32)
    scale = block_scale(amax(values, blocking.axes), spec.scale, spec.element, noise)
    return blocking, round_elements(ratio(values, scale, spec), spec, noise), scale


def round_elements(u: Tensor, spec: QuantSpec, noise: Noise) -> Tensor:
    """Return ``u`` (fp32, in the blocked layout) rounded to the spec's element format by the spec's rule."""
    if spec.rounding == "stochastic":
        return round_stochastic(u, spec.element, noise.bits(), spec.random_bits)
    return round_nearest(u, spec.element, spec.ties)
