"""The matrices that a server multiplies with, and how it quantizes their activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fp4graph.errors import Error

Array = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Kind = Literal["mxfp4", "nvfp4"]

_CODES = np.arange(256)
_MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_E2M1: Array = np.array([*_MAGNITUDES, *(-m for m in _MAGNITUDES)], np.float32)
_EXPONENTS = _CODES >> 3 & 15
_E4M3: Array = np.ldexp(np.where(_EXPONENTS > 0, 8, 0) + (_CODES & 7), np.maximum(_EXPONENTS, 1) - 10).astype(
    np.float32
)
_E4M3 = np.where(_CODES & 127 == 127, np.nan, np.where(_CODES > 127, -_E4M3, _E4M3)).astype(np.float32)
_E8M0: Array = np.where(_CODES == 255, np.nan, np.ldexp(1.0, _CODES - 127)).astype(np.float32)
_SCALES: dict[Kind, Array] = {"mxfp4": _E8M0, "nvfp4": _E4M3}


class ServerError(Error):
    """A server cannot load a checkpoint; the message names the server, the layer and the reason."""


@dataclass(frozen=True, eq=False)
class Activations:
    """The rule by which a server quantizes the activations of a layer.

    Attributes:
        kind: ``nvfp4``: blocks of 16 with E4M3 scales, computed at each call under the constant ``scale``. ``mxfp4``:
            blocks of 32 with E8M0 scales, computed at each call and rounded as the kernel does. None: high precision.
        scale: γ, a constant from the checkpoint; None unless ``kind`` is ``nvfp4``.
        divisor: 1/γ as the server holds it, which may differ from ``1 / scale`` by an ulp; None if ``scale`` is None.
    """

    kind: Kind | None
    scale: np.float32 | None = None
    divisor: np.float32 | None = None

    def quantize(self, x: Array) -> Array:
        """Return ``x``, fp32 ``[..., K]``, as the server's GEMM multiplies it.

        S = E4M3(amax_block/6 · 1/γ), elements E2M1(x / (S·γ)), both to nearest even; the result is element · S · γ.

        Raises:
            ServerError: the kind is ``mxfp4``, whose scales are rounded by the kernel.
        """
        if self.kind == "mxfp4":
            raise ServerError("activations in MXFP4 are rounded by the server's kernel, and kernels differ")
        if self.scale is None or self.divisor is None:
            return x
        blocks = x.reshape(*x.shape[:-1], -1, 16)
        amax = np.abs(blocks).max(-1, keepdims=True)
        scales = np.minimum(_rounded(self.divisor * (amax * np.float32(1 / 6)), -6, 3), np.float32(448))
        with np.errstate(divide="ignore"):
            factor = np.where(scales > 0, 1 / (scales * (1 / self.divisor)), np.float32(0))
        elements = np.clip(_rounded(np.clip(blocks * factor, -6, 6), 0, 1), -6, 6)
        quantized: Array = (elements * scales * self.scale).reshape(x.shape)
        return quantized


def _rounded(x: Array, lowest: int, bits: int) -> Array:
    """Round to ``bits`` bits after the leading bit, ties to even, with subnormals below the exponent ``lowest``."""
    exponents = np.maximum(np.frexp(x)[1] - 1, lowest)
    step = np.ldexp(np.float32(1), exponents - bits)
    rounded: Array = np.rint(x / step) * step
    return rounded


@dataclass(frozen=True, eq=False)
class Fused:
    """A quantized layer of a server: ``element · block scale · multiplier``.

    Attributes:
        name: the layer's name in the server's model.
        modules: the fused modules of the checkpoint, in the order of their rows; for experts, the modules of expert 0.
        rows: the number of rows of each module.
        kind: the kind of the weight's blocks.
        codes: uint8 ``[..., N, K/2]``, two elements of E2M1 per byte, the first in the low half. Experts have a leading
            axis.
        scales: bytes of the block scales, uint8 ``[..., N, K/block]``: E4M3 for ``nvfp4``, E8M0 for ``mxfp4``.
        multiplier: γ, fp32: 0-d, or ``[E]`` for experts; 1 for ``mxfp4``.
        activations: how the server quantizes the input of the layer.
    """

    name: str
    modules: tuple[str, ...]
    rows: tuple[int, ...]
    kind: Kind
    codes: Bytes
    scales: Bytes
    multiplier: Array
    activations: Activations

    def products(self) -> Array:
        """Return ``element · block scale``, fp32 ``[..., N, K]``, which is exact."""
        pairs = np.stack([self.codes & 15, self.codes >> 4], -1)
        elements = _E2M1[pairs].reshape(*self.scales.shape, -1)
        return (elements * _SCALES[self.kind][self.scales][..., None]).reshape(*self.codes.shape[:-1], -1)

    def dequantized(self) -> Array:
        """Return the weight, fp32 ``[..., N, K]``: the products times γ, rounded once."""
        return self.products() * self.multiplier[..., None, None]
