"""Quantizers as data: :class:`QuantSpec` describes the quantizer of one operand, :class:`ScaleSpec` its scales."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeVar, get_args

from fp4graph.errors import SpecError
from fp4graph.numerics.formats import ElementFormat, ScaleFormat, element_format, scale_format

ScaleRounding = Literal[
    "floor", "ceil", "rceil", "nearest_even", "toward_positive", "stochastic", "amax_ceil", "amax_even"
]
Convention = Literal["decode", "encode"]
Zero = Literal["nearest_subnormal", "to_one"]
Rounding = Literal["nearest", "stochastic"]
Ties = Literal["even", "up", "away"]
ScaleTies = Literal["up", "even"]
Source = Literal["original", "fprop"]
Selector = Literal["mse", "mae", "amax"]
Block = int | tuple[int, int] | Literal["row", "tensor"]

#: Aliases of scale-rounding rules, each with the name that a :class:`ScaleSpec` replaces it by.
_SCALE_ALIASES: dict[str, ScaleRounding] = {"rceil": "ceil"}
#: Rules that make a power of two from the exponent of Z, for formats whose values are all powers of two.
POWERS_OF_TWO: tuple[ScaleRounding, ...] = ("floor", "ceil", "amax_ceil", "amax_even")
#: Rules that round the ideal scale to one of its neighbours in the format, the same way for s = Qmax/Z and S = Z/Qmax.
_EITHER_CONVENTION: tuple[ScaleRounding, ...] = ("nearest_even", "stochastic")

_Format = TypeVar("_Format")


def _format(name: str, value: object, kind: type[_Format], look_up: Callable[[str], _Format]) -> _Format:
    """Return ``value`` if it is a format, or the format that it names."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, str):
        raise SpecError(f"{name} must be a format's name or {kind.__name__}; got {_shown(value)}")
    try:
        return look_up(value)
    except ValueError as error:
        raise SpecError(str(error)) from None


def _holds(element: ElementFormat, other: ElementFormat) -> bool:
    """Return whether ``element`` has all values of ``other``, both stretched to one maximum."""
    values = {value * other.max for value in element.magnitudes()}  # exact: both factors have few significant bits
    return values.issuperset(value * element.max for value in other.magnitudes())


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise SpecError(f"{name} must be one of {', '.join(choices)}; got {_shown(value)}")


def _shown(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


@dataclass(frozen=True)
class ScaleSpec:
    """The rule by which a block's scale is chosen from its statistic Z, the block amax unless a technique changes it.

    Attributes:
        format: the values that a stored scale may have, as a name or a :class:`ScaleFormat`.
        rounding: the rule by which the scale becomes a value of ``format``, from the table below. By default it is
            ``floor`` for decode scales in a format without mantissa bits, and ``nearest_even`` for all others.
        convention: ``decode`` stores S ≈ Z / Qmax, which elements are multiplied by (OCP, hardware); ``encode``
            stores s ≈ Qmax / Z, which multiplies x before rounding ("Elucidating the design space of FP4
            training", sec. 2).
        zero: the value of a scale that underflows: ``nearest_subnormal``, the format's smallest positive value, or
            ``to_one`` (Chmiel et al. 2025).
        ties: where ``nearest_even`` rounds a scale halfway between two powers of two: ``up`` (the default, kept as
            None), as ml_dtypes and torch cast to E8M0, or to the ``even`` code, as gfloat rounds. A format with
            mantissa bits always rounds ties to even and takes no ``ties``.

    There are two families of rules, with Qmax the largest value of the element format and Emax its exponent::

        rule             scale                                 formats        convention  elsewhere
        floor            2^(floor(log2 Z) - Emax)              powers of two  decode      OCP MX, microxcaling, FLOOR
        ceil, rceil      2^ceil(log2(Z / Qmax))                powers of two  decode      RCEIL, TetraJet (truncation-
                                                                                          free), TransformerEngine MXFP8
        amax_ceil        2^(ceil(log2 Z) - Emax)               powers of two  decode      CEIL
        amax_even        floor of Z rounded to element's bits  powers of two  decode      EVEN
        nearest_even     nearest to Z / Qmax or Qmax / Z       any            either      NVFP4 (E4M3)
        toward_positive  Z / Qmax rounded up                   any            decode      ceil, for E8M0
        stochastic       a neighbour of Z / Qmax or Qmax / Z   any            either      design-space paper, sec. 3.1

    Names in capitals are members of torchao's ``ScaleCalculationMode``. The rules that make powers of two read the
    exponent of Z and are for formats without mantissa bits (E8M0). The other rules round the ideal scale to one of its
    neighbours in the format; in ``fp32`` they change nothing.
    """

    format: ScaleFormat = field(default="e8m0")  # type: ignore[assignment]  # a name is converted below
    rounding: ScaleRounding = field(default=None)  # type: ignore[arg-type]  # replaced by the format's own below
    convention: Convention = "decode"
    zero: Zero = "nearest_subnormal"
    ties: ScaleTies | None = None

    def __post_init__(self) -> None:
        resolved = _format("scale format", self.format, ScaleFormat, scale_format)
        object.__setattr__(self, "format", resolved)
        _check_choice("scale convention", self.convention, get_args(Convention))
        rounding: object = self.rounding
        if rounding is None:
            exponents_only = resolved.mantissa_bits == 0 and self.convention == "decode"
            object.__setattr__(self, "rounding", "floor" if exponents_only else "nearest_even")
        _check_choice("scale rounding", self.rounding, get_args(ScaleRounding))
        object.__setattr__(self, "rounding", _SCALE_ALIASES.get(self.rounding, self.rounding))
        _check_choice("scale zero", self.zero, get_args(Zero))
        if self.ties is not None:
            self._set_ties()
        if self.convention == "encode" and self.rounding not in _EITHER_CONVENTION:
            raise SpecError(
                f"scale rounding {self.rounding!r} is a rule for decode scales; with convention: encode use "
                "nearest_even or stochastic"
            )
        if self.rounding in POWERS_OF_TWO and resolved.mantissa_bits:
            raise SpecError(
                f"scale rounding {self.rounding!r} makes a power of two, and {resolved.name} scales have "
                f"{resolved.mantissa_bits} mantissa bits, which would be lost; use nearest_even, toward_positive or "
                "stochastic with it, or format: e8m0 for powers of two"
            )

    def _set_ties(self) -> None:
        """Check that the rule has ties between powers of two, and keep ``up``, the default, as None."""
        _check_choice("scale ties", self.ties, get_args(ScaleTies))
        if self.rounding != "nearest_even" or self.format.mantissa_bits:
            reason = (
                f"{self.format.name} scales have mantissa bits, and their ties go to even already"
                if self.rounding == "nearest_even"
                else f"{self.rounding} has no ties"
            )
            raise SpecError(
                f"scale ties {self.ties!r} choose between powers of two under rounding: nearest_even; {reason}. Leave "
                "ties out"
            )
        if self.ties == "up":
            object.__setattr__(self, "ties", None)

    @property
    def rounds_up(self) -> bool:
        """True if the rule never rounds a decode scale down, so that no element is clipped."""
        return self.rounding in ("ceil", "amax_ceil", "toward_positive")

    @property
    def zero_is_subnormal(self) -> bool:
        """True if blocks of zeros are divided by a scale that is subnormal in fp32."""
        smallest = self.zero == "nearest_subnormal" and self.convention == "decode"
        return smallest and self.format.min < 2.0**-126


@dataclass(frozen=True)
class QuantSpec:
    """The complete quantizer of one operand.

    Each block may choose between several elements, as IF4 chooses between E2M1 and INT4 (Cook et al. 2026, "Adaptive
    Block-Scaled Data Types"). The block's scale is that of the first element. The values of the others are stretched
    to the maximum of the first: by 6/7 for INT4 after E2M1. A block takes the element with the least error by
    ``selector`` after rounding to nearest, and the first of elements with equal errors. Blocks that round
    stochastically choose in the same way, so that the choice does not depend on the draw.

    Attributes:
        element: the values that an element may have, as a name or an :class:`ElementFormat`; or a list of these, from
            which each block chooses. The attribute then holds the first format of the list, and ``others`` the others.
        block: the elements that share a scale: a number of elements along the contraction axis; ``(r, c)`` for 2-D
            blocks over the last two axes; ``"row"`` for one scale per line along the contraction axis; ``"tensor"``
            for one scale.
        scale: how the scale of each block is chosen.
        rounding: how elements are rounded, ``nearest`` or ``stochastic``.
        ties: where ``nearest`` rounds a tie: to the ``even`` code, ``up`` (toward +inf, TetraJet Alg. 1) or ``away``
            from zero.
        random_bits: the bits of noise per stochastically rounded element, 1 to 24. Fewer than 24 bits stand for the
            midpoint of their interval (Fitzgibbon & Felix 2025).
        source: the tensor that is quantized: the ``original`` operand, or the dequantized operand of ``fprop`` (double
            quantization).
        from_master: whether to quantize the tensor before autocast's cast instead of after it.
        others: the formats that a block may choose in place of ``element``; empty by default.
        selector: the measure of errors e by which a block chooses, ``mse`` Σe² (the default), ``mae`` Σabs(e) or
            ``amax`` max abs(e); None for a single element format.
    """

    element: ElementFormat = field(default="e2m1")  # type: ignore[assignment]  # a name is converted below
    block: Block = 32
    scale: ScaleSpec = ScaleSpec()
    rounding: Rounding = "nearest"
    ties: Ties = "even"
    random_bits: int = 24
    source: Source = "original"
    from_master: bool = False
    others: tuple[ElementFormat, ...] = ()
    selector: Selector | None = None

    def __post_init__(self) -> None:
        self._set_elements()
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
        _check_choice("rounding", self.rounding, get_args(Rounding))
        _check_choice("ties", self.ties, get_args(Ties))
        _check_choice("source", self.source, get_args(Source))
        if type(self.random_bits) is not int or not 1 <= self.random_bits <= 24:
            raise SpecError(f"random_bits is a whole number between 1 and 24; got {_shown(self.random_bits)}")
        if not isinstance(self.from_master, bool):
            raise SpecError(f"from_master must be True or False; got {_shown(self.from_master)}")

    def _set_elements(self) -> None:
        """Separate the first element from the others, and check that a block can choose among them."""
        element: object = self.element
        listed: tuple[object, ...] = tuple(element) if isinstance(element, tuple | list) else (element,)
        if not listed:
            raise SpecError("element is an empty list; name at least one element format")
        if len(listed) > 1 and self.others:
            raise SpecError("others and a list in element both name further elements; write the list alone")
        first, *others = (_format("element", each, ElementFormat, element_format) for each in (*listed, *self.others))
        if others and type(self.others) is not tuple:
            raise SpecError(f"others must be a tuple of element formats; got {_shown(self.others)}")
        object.__setattr__(self, "element", first)
        object.__setattr__(self, "others", tuple(others))
        if len({first, *others}) <= len(others):
            raise SpecError(f"the elements of a list must differ; got {self.element_name}")
        if any(other.code_bits != first.code_bits for other in others):
            widths = ", ".join(f"{each.name} {each.code_bits}" for each in self.elements)
            raise SpecError(f"the elements of a list must have codes of one width, in bits; got {widths}")
        for index, other in enumerate(others, start=1):
            finer = [each for each in self.elements[:index] if _holds(each, other)]
            if finer:
                raise SpecError(
                    f"no block would choose {other.name}: each of its values, stretched to the maximum of "
                    f"{finer[0].name}, is a value of {finer[0].name} too; leave {other.name} out"
                )
        if self.selector is None:
            object.__setattr__(self, "selector", "mse" if others else None)
        elif not others:
            raise SpecError(
                f"selector {self.selector!r} chooses between elements, but element names only {first.name}; name "
                "several, as in element: [e2m1, int4], or leave selector out"
            )
        else:
            _check_choice("selector", self.selector, get_args(Selector))

    @property
    def elements(self) -> tuple[ElementFormat, ...]:
        """The elements that a block chooses between, or the only one."""
        return (self.element, *self.others)

    @property
    def element_name(self) -> str:
        """The names of the elements, as in "e2m1|int4"."""
        return "|".join(each.name for each in self.elements)

    @property
    def needs_key(self) -> bool:
        """True if quantizing draws noise."""
        return self.rounding == "stochastic" or self.scale.rounding == "stochastic"

    def to_text(self) -> str:
        """Return the spec with its formats as one line; :meth:`from_text` gives an equal spec in any process."""
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        data = asdict(self)
        if not self.others:  # a text is part of names of compiled code, and unused fields would change it
            del data["others"], data["selector"]
        if self.scale.ties is None:
            del data["scale"]["ties"]
        return json.dumps(data)

    @staticmethod
    @functools.cache
    def from_text(text: str) -> QuantSpec:
        """Return the spec that :meth:`to_text` wrote."""
        data = json.loads(text)
        scale = ScaleSpec(**data["scale"] | {"format": ScaleFormat(**data["scale"]["format"])})
        block = tuple(data["block"]) if isinstance(data["block"], list) else data["block"]
        others = tuple(ElementFormat(**each) for each in data.get("others", ()))
        formats = {"element": ElementFormat(**data["element"]), "others": others}
        return QuantSpec(**data | formats | {"scale": scale, "block": block})
