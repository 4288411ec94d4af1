"""One operand's quantizer as data."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field
from typing import Literal

from fp4graph.numerics.formats import ElementFormat, ScaleFormat, element_format, scale_format

ScaleRounding = Literal["floor", "ceil", "nearest_even", "toward_positive", "stochastic", "amax_ceil", "amax_even"]
Block = int | tuple[int, int] | Literal["row", "tensor"]


@dataclass(frozen=True)
class ScaleSpec:
    """How one block's scale is chosen from its statistic Z (its amax unless a technique says otherwise).

    Attributes:
        format: what the stored scale may be; a name or a :class:`ScaleFormat`.
        rounding: ``floor`` 2^(floor(log2 Z) - Emax) (OCP); ``ceil`` 2^ceil(log2(Z / Qmax)), truncation-free (TetraJet);
            ``nearest_even``, ``toward_positive`` and ``stochastic`` round the ideal scale to the format;
            ``amax_ceil`` 2^(ceil(log2 Z) - Emax) and ``amax_even`` (Z rounded to the element's mantissa, then
            ``floor``) are torchao's CEIL and EVEN.
        convention: ``decode`` rounds S = Z / Qmax, which multiplies after (OCP, hardware); ``encode`` rounds
            s = Qmax / Z, which multiplies before ("Elucidating the design space of FP4 training", sec. 2).
        zero: what an underflowing scale becomes: ``nearest_subnormal``, the format's smallest positive value, or
            ``to_one`` (Chmiel et al. 2025).
    """

    format: ScaleFormat = field(default="e8m0")  # type: ignore[assignment]  # a name is converted below
    rounding: ScaleRounding = "floor"
    convention: Literal["decode", "encode"] = "decode"
    zero: Literal["nearest_subnormal", "to_one"] = "nearest_subnormal"

    def __post_init__(self) -> None:
        if isinstance(self.format, str):
            object.__setattr__(self, "format", scale_format(self.format))
        if self.convention == "encode" and self.rounding not in ("nearest_even", "stochastic"):
            raise ValueError(
                f"scale rounding {self.rounding!r} is a rule for decode scales; with convention: encode use "
                "nearest_even or stochastic"
            )


@dataclass(frozen=True)
class QuantSpec:
    """One operand's quantizer, complete.

    Attributes:
        element: element format; a name or an :class:`ElementFormat`.
        block: elements along the contraction axis that share a scale; ``(r, c)`` for 2-D blocks over the last two
            axes; ``"row"``: one scale per line along the contraction axis; ``"tensor"``: one scale.
        scale: how scales are chosen.
        rounding: of elements, ``nearest`` or ``stochastic``.
        ties: of nearest rounding, ``even`` (code), ``up`` (toward +inf, TetraJet Alg. 1) or ``away`` (from zero).
        random_bits: bits of noise per stochastically rounded element, 1 to 24; fewer than 24 compare against the
            midpoint of their interval (Fitzgibbon & Felix 2025).
        source: ``original`` or ``fprop``: requantize the dequantized fprop operand (double quantization).
        from_master: quantize the tensor as it was before autocast's cast, not after.
    """

    element: ElementFormat = field(default="e2m1")  # type: ignore[assignment]  # a name is converted below
    block: Block = 32
    scale: ScaleSpec = ScaleSpec()
    rounding: Literal["nearest", "stochastic"] = "nearest"
    ties: Literal["even", "up", "away"] = "even"
    random_bits: int = 24
    source: Literal["original", "fprop"] = "original"
    from_master: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.element, str):
            object.__setattr__(self, "element", element_format(self.element))
        sizes = self.block if isinstance(self.block, tuple) else (self.block,)
        if any(isinstance(size, int) and size < 1 for size in sizes):
            raise ValueError(f"a block holds at least one element; got block={self.block}")
        if not 1 <= self.random_bits <= 24:
            raise ValueError(f"random_bits is between 1 and 24; got {self.random_bits}")

    @property
    def needs_key(self) -> bool:
        """Whether quantizing draws noise."""
        return self.rounding == "stochastic" or self.scale.rounding == "stochastic"

    def to_text(self) -> str:
        """All of it in one line, formats included; :meth:`from_text` gives an equal spec in any process."""
        return _text(self)

    @staticmethod
    def from_text(text: str) -> QuantSpec:
        """The inverse of :meth:`to_text`."""
        return _spec(text)


@functools.cache
def _text(spec: QuantSpec) -> str:
    return json.dumps(asdict(spec))


@functools.cache
def _spec(text: str) -> QuantSpec:
    data = json.loads(text)
    scale = ScaleSpec(**data["scale"] | {"format": ScaleFormat(**data["scale"]["format"])})
    block = tuple(data["block"]) if isinstance(data["block"], list) else data["block"]
    return QuantSpec(**data | {"element": ElementFormat(**data["element"]), "scale": scale, "block": block})
