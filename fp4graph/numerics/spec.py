"""One operand's quantizer as data."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeVar, get_args

from fp4graph.errors import SpecError
from fp4graph.numerics.formats import ElementFormat, ScaleFormat, element_format, scale_format

ScaleRounding = Literal["floor", "ceil", "nearest_even", "toward_positive", "stochastic", "amax_ceil", "amax_even"]
Convention = Literal["decode", "encode"]
Zero = Literal["nearest_subnormal", "to_one"]
Rounding = Literal["nearest", "stochastic"]
Ties = Literal["even", "up", "away"]
Source = Literal["original", "fprop"]
Block = int | tuple[int, int] | Literal["row", "tensor"]

#: Rules that make a power of two from the exponent of Z, for formats that hold nothing else.
POWERS_OF_TWO: tuple[ScaleRounding, ...] = ("floor", "ceil", "amax_ceil", "amax_even")
#: Rules that round the ideal scale to its neighbours in the format, and mean the same for s = Qmax/Z as for S = Z/Qmax.
_EITHER_CONVENTION: tuple[ScaleRounding, ...] = ("nearest_even", "stochastic")

_Format = TypeVar("_Format")


def _format(name: str, value: object, kind: type[_Format], look_up: Callable[[str], _Format]) -> _Format:
    """The format that ``value`` is or names."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise SpecError(f"{name} must be a format's name or {kind.__name__}; got {_shown(value)}")
    try:
        return look_up(value)
    except ValueError as error:
        raise SpecError(str(error)) from None


def _one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in known:
        raise SpecError(f"{name} must be one of {', '.join(known)}; got {_shown(value)}")


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


@dataclass(frozen=True)
class ScaleSpec:
    """How one block's scale is chosen from its statistic Z (its amax unless a technique says otherwise).

    Attributes:
        format: what the stored scale may be; a name or a :class:`ScaleFormat`.
        rounding: ``nearest_even``, ``toward_positive`` and ``stochastic`` round the ideal scale to the format, which
            for ``fp32`` changes nothing. The other rules make a power of two, and are for formats of nothing else
            (E8M0): ``floor`` 2^(floor(log2 Z) - Emax) (OCP); ``ceil`` 2^ceil(log2(Z / Qmax)), truncation-free
            (TetraJet); ``amax_ceil`` 2^(ceil(log2 Z) - Emax) and ``amax_even`` (Z rounded to the element's mantissa,
            then ``floor``), torchao's CEIL and EVEN. Left out, it is ``floor`` for a decode scale in a format without
            mantissa bits, and ``nearest_even`` for every other scale.
        convention: ``decode`` rounds S = Z / Qmax, which multiplies after (OCP, hardware); ``encode`` rounds
            s = Qmax / Z, which multiplies before ("Elucidating the design space of FP4 training", sec. 2).
        zero: what an underflowing scale becomes: ``nearest_subnormal``, the format's smallest positive value, or
            ``to_one`` (Chmiel et al. 2025).
    """

    format: ScaleFormat = field(default="e8m0")  # type: ignore[assignment]  # a name is converted below
    rounding: ScaleRounding = field(default=None)  # type: ignore[arg-type]  # replaced by the format's own below
    convention: Convention = "decode"
    zero: Zero = "nearest_subnormal"

    def __post_init__(self) -> None:
        number = _format("scale format", self.format, ScaleFormat, scale_format)
        object.__setattr__(self, "format", number)
        _one_of("scale convention", self.convention, get_args(Convention))
        rounding: object = self.rounding
        if rounding is None:
            exponents_only = number.mantissa_bits == 0 and self.convention == "decode"
            object.__setattr__(self, "rounding", "floor" if exponents_only else "nearest_even")
        _one_of("scale rounding", self.rounding, get_args(ScaleRounding))
        _one_of("scale zero", self.zero, get_args(Zero))
        if self.convention == "encode" and self.rounding not in _EITHER_CONVENTION:
            raise SpecError(
                f"scale rounding {self.rounding!r} is a rule for decode scales; with convention: encode use "
                "nearest_even or stochastic"
            )
        if self.rounding in POWERS_OF_TWO and number.mantissa_bits:
            raise SpecError(
                f"scale rounding {self.rounding!r} makes a power of two, and {number.name} scales have "
                f"{number.mantissa_bits} mantissa bits, which would be lost; use nearest_even, toward_positive or "
                "stochastic with it, or format: e8m0 for powers of two"
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
    rounding: Rounding = "nearest"
    ties: Ties = "even"
    random_bits: int = 24
    source: Source = "original"
    from_master: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "element", _format("element", self.element, ElementFormat, element_format))
        sizes = self.block if isinstance(self.block, tuple) and len(self.block) == 2 else (self.block,)
        if self.block not in ("row", "tensor") and not all(type(size) is int for size in sizes):
            raise SpecError(
                f"block must be a whole number, a tuple of two, 'row' or 'tensor'; got {_shown(self.block)}"
            )
        if any(isinstance(size, int) and size < 1 for size in sizes):
            raise SpecError(f"a block holds at least one element; got block={self.block}")
        scale: object = self.scale
        if not isinstance(scale, ScaleSpec):
            fields = [f"{key}={value!r}" for key, value in scale.items()] if isinstance(scale, dict) else ["'e4m3'"]
            raise SpecError(f"scale must be a ScaleSpec; got {_shown(scale)}. Write ScaleSpec({', '.join(fields)})")
        _one_of("rounding", self.rounding, get_args(Rounding))
        _one_of("ties", self.ties, get_args(Ties))
        _one_of("source", self.source, get_args(Source))
        if type(self.random_bits) is not int or not 1 <= self.random_bits <= 24:
            raise SpecError(f"random_bits is a whole number between 1 and 24; got {_shown(self.random_bits)}")
        if not isinstance(self.from_master, bool):
            raise SpecError(f"from_master must be True or False; got {_shown(self.from_master)}")

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
