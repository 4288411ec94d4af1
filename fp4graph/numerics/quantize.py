"""Quantizes and dequantizes one tensor."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING

import torch

from fp4graph.errors import SpecError
from fp4graph.numerics import noise
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.exact import block_error
from fp4graph.numerics.formats import ElementFormat
from fp4graph.numerics.rounding import power_of_two, round_nearest, round_stochastic
from fp4graph.numerics.scaling import amax, block_scale, constant, dequantize, ratio
from fp4graph.numerics.spec import QuantSpec

if TYPE_CHECKING:
    from torch import Tensor

    from fp4graph.numerics.noise import Noise

_SMALLEST_NORMAL = 2.0**-126  # of fp32
#: Two errors of a block that differ by less than this share count as equal: rounding the fp32 ratios may separate them.
EQUAL = 2.0**-20


def fake_quantize(x: Tensor, spec: QuantSpec, dim: int = -1, key: int | Tensor | None = None) -> Tensor:
    """Return ``x`` rounded to the values that ``spec`` can represent, in the shape and dtype of ``x``.

    The computation is in fp32; float64 is rounded to fp32 first. A block that holds NaN or Inf becomes NaN (OCP's
    poisoned block), and a block of zeros stays zero. The block's maximum may be rounded up past the range of the dtype;
    such a value becomes Inf, as in any cast. Derivatives pass straight through, in reverse and in forward mode: the
    gradient of ``x`` is that of the result.

    Args:
        x: floating point, at least one axis, any strides.
        dim: the contraction axis, which blocks run along.
        key: the key of the random bits, if ``spec`` needs any: an int, or an int32 ``[2]`` tensor.

    Raises:
        TypeError: ``x`` is not floating point or not dense, or ``spec`` is not a :class:`QuantSpec` (a
            :class:`fp4graph.SpecError`).
        ValueError: ``spec`` needs random bits and ``key`` is None, ``key`` is something else, ``dim`` is out of range,
            or ``x`` has too few axes for the block.
    """
    blocking, codes, scale = quantize(x, spec, dim, key)
    y: Tensor = blocking.join(dequantize(codes, scale, spec).to(x.dtype))
    from fp4graph import torch_internals  # not above: commands read plugins without torch

    transformed = torch_internals.is_functorch_active() or torch_internals.is_forward_mode_active()
    if not (x.requires_grad or transformed):
        return y
    # The bracket is +0, which leaves y as it is, -0 too, and has the derivative of x. torch drops the derivatives of an
    # autograd.Function where torch.compile meets torch.func.
    wide = x.to(torch.float32) if x.element_size() == 1 else x  # torch subtracts no 8-bit floats
    return (y.to(wide.dtype) - (wide.detach() - wide)).to(x.dtype)


def quantize(
    x: Tensor, spec: QuantSpec, dim: int = -1, key: int | Tensor | None = None
) -> tuple[Blocking, Tensor, Tensor]:
    """Return the blocking of ``x``, its element values and its scales, both fp32 in the blocked layout, detached."""
    if not isinstance(spec, QuantSpec):
        raise SpecError(f"spec must be a QuantSpec, such as QuantSpec('e2m1', 32); got {type(spec).__name__}")
    if not (isinstance(x, torch.Tensor) and x.is_floating_point()):
        got = x.dtype if isinstance(x, torch.Tensor) else f"a {type(x).__name__}; pass a torch.Tensor"
        raise TypeError(f"only floating-point tensors can be quantized; got {got}")
    if x.layout is not torch.strided or x.is_nested:
        layout = "a nested tensor; pass its values" if x.is_nested else f"{x.layout}; pass x.to_dense()"
        raise TypeError(f"only dense tensors can be quantized; got {layout}")
    blocking = Blocking(tuple(x.shape), spec.block, dim)
    if isinstance(key, int | numbers.Integral):  # of NumPy, for example
        key = noise.make_key(int(key), device=x.device)
    elif key is not None and not _is_key(key):
        shown = f"{key.dtype} {list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)
        raise ValueError(f"a key is an int or an int32 tensor of two elements; got {shown}")
    random = noise.Noise(key, blocking, x.device)
    if spec.needs_key and key is None:
        raise ValueError("this spec rounds stochastically: pass a key (an int or a tensor from make_key)")
    values = blocking.split(x.detach()).to(torch.float32)
    scale = block_scale(amax(values, blocking.axes), spec.scale, spec.element, random)
    return blocking, round_elements(ratio(values, scale, spec), spec, random), scale


def _is_key(key: object) -> bool:
    return isinstance(key, torch.Tensor) and key.dtype is torch.int32 and key.shape == (2,)


def round_elements(u: Tensor, spec: QuantSpec, noise: Noise) -> Tensor:
    """Return ``u`` (fp32, in the blocked layout) rounded to the spec's element format by the spec's rule.

    If the spec has several element formats, each block takes the one with the least error. The values of the other
    formats are stretched to the maximum of the first.
    """
    if not spec.others:
        return _round(u, spec.element, spec, noise)
    # The candidates of a block share its scale, so errors of ratios compare like errors of dequantized values. Division
    # by a power of two above the block's largest ratio brings errors to [0, 1], as block_error needs.
    axes = noise.blocking.axes
    above = 2 * power_of_two(u.abs().amax(axes, keepdim=True)).clamp(min=_SMALLEST_NORMAL).double()
    chosen = least = None
    for element in spec.elements:
        stretched = _stretched(u, element, spec.element)
        nearest = _stretched(round_nearest(stretched, element, spec.ties), spec.element, element)
        errors = (nearest.double() - u.double()).abs() / above
        assert spec.selector is not None
        error = block_error(errors, spec.selector, spec.block, axes)
        rounded = nearest
        if spec.rounding != "nearest":
            rounded = _stretched(_round(stretched, element, spec, noise), spec.element, element)
        if chosen is None or least is None:
            chosen, least = rounded, error
        else:
            better = error < least * (1 - EQUAL)
            chosen, least = torch.where(better, rounded, chosen), torch.where(better, error, least)
    assert chosen is not None
    return chosen


def _stretched(u: Tensor, target: ElementFormat, origin: ElementFormat) -> Tensor:
    """Return fp32 ``u`` times ``target.max / origin.max``, which maps the range of ``origin`` to that of ``target``.

    Multiplying first and dividing then, both correctly rounded, maps midpoints to midpoints.
    """
    return u if target.max == origin.max else u * target.max / constant(origin.max, u)


def _round(u: Tensor, element: ElementFormat, spec: QuantSpec, noise: Noise) -> Tensor:
    if spec.rounding == "stochastic":
        return round_stochastic(u, element, noise.bits(), spec.random_bits)
    return round_nearest(u, element, spec.ties)
