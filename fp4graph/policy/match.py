"""The left-hand side of a rule: the predicates on a site."""

from __future__ import annotations

import fnmatch
import math
import re
import string
from collections.abc import Iterable
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, model_validator

from fp4graph.policy.adapters import names_adapters, names_before
from fp4graph.policy.section import COUNT_OR_SHARE, Count, Globs, OneOrMore, Section, Size, Texts, must_be, wrong
from fp4graph.technique.site import SiteView

Op = Literal["linear", "matmul", "grouped", "sdpa", "conv"]
Role = Literal["adapter", "router", "head"]
#: The other names by which Python, Dynamo or torch's methods call an operation, with its name as a producer.
PRODUCERS = {
    "truediv": "div", "__rdiv__": "div", "__rtruediv__": "div", "__rsub__": "sub", "mod": "remainder",
    "__rfloordiv__": "floordiv", "__floordiv__": "floordiv", "__invert__": "invert", "iadd": "add_", "isub": "sub_",
    "imul": "mul_", "itruediv": "div_",
}  # fmt: skip
#: Matches what looks like a range of numbers in a glob, as [0-11]: in a glob it is a set of characters, here 0 and 1.
_NUMBERS = re.compile(r"\[(!?)(\d\d+-\d+|\d-\d\d+)\]")


def misread_range(globs: Iterable[str]) -> str | None:
    """Return why a glob with what looks like a range of numbers is refused, with the spelling of both readings."""
    for numbers in filter(None, map(_NUMBERS.search, globs)):
        digits = "".join(digit for digit in string.digits if fnmatch.fnmatchcase(digit, f"[{numbers[2]}]"))
        return (
            f"{numbers[0]} in a glob matches one character, not a range of numbers; for the range write a list of "
            f'globs, such as ["layers.[0-9].*", "layers.1[01].*"], and for the characters [{numbers[1]}{digits}]'
        )
    return None


class Range(Section):
    """Bounds on a whole number, each optional; ``min == max`` allows one value.

    A policy writes ``{min, max, multiple_of}``, or the one allowed value by itself or as ``{exactly: value}``.
    """

    min: Size | None = Field(None, description="The smallest number.")
    max: Size | None = Field(None, description="The largest number.")
    multiple_of: Count | None = Field(None, description="A divisor of the number.")

    @model_validator(mode="before")
    @classmethod
    def _exact(cls, data: Any) -> Any:
        if isinstance(data, int) and not isinstance(data, bool):
            return {"min": data, "max": data}
        if isinstance(data, dict) and data.get("exactly") is not None:
            if {"min", "max"} & data.keys():
                raise ValueError("exactly cannot stand beside min or max; remove one of them")
            bounds = {key: value for key, value in data.items() if key != "exactly"}
            return {"min": data["exactly"], "max": data["exactly"], **bounds}
        return data

    @classmethod
    def written_keys(cls) -> list[str]:
        """Return the fields and ``exactly``."""
        return [*super().written_keys(), "exactly"]

    @model_validator(mode="after")
    def _bounds_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("give at least one of min, max, multiple_of and exactly")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}: no number is in this range")
        return self

    def __contains__(self, value: int | None) -> bool:
        """Return whether ``value`` is within the bounds; None, for an unknown or symbolic size, never is."""
        return (
            value is not None
            and (self.min is None or value >= self.min)
            and (self.max is None or value <= self.max)
            and (self.multiple_of is None or value % self.multiple_of == 0)
        )

    def __str__(self) -> str:
        if self.min is not None and self.min == self.max and self.multiple_of is None:
            return str(self.min)
        parts = {"at least": self.min, "at most": self.max, "a multiple of": self.multiple_of}
        return " and ".join(f"{words} {bound}" for words, bound in parts.items() if bound is not None)


def _counted(value: Any) -> Any:
    is_count = type(value) is int and value >= 1
    if not is_count and not (isinstance(value, float) and 0 < value < 1):
        raise wrong("a whole number of blocks, at least 1, or a share of them between 0 and 1")
    return value


#: A number of blocks, or a share of the blocks of a stack.
Blocks = Annotated[int | float, BeforeValidator(_counted), COUNT_OR_SHARE]


def _blocks(wanted: int | float | None, total: int) -> int:
    """Return a number of blocks out of ``total``. A share is read by its decimal digits and rounded up."""
    if wanted is None:
        return total
    return wanted if isinstance(wanted, int) else math.ceil(Fraction(str(wanted)) * total)


class Match(Section):
    """Predicates on a site, all of which must hold; a key that is left out holds for every site."""

    # Fused attention needs `op: sdpa`, because splitting it into products takes O(N²) memory. A convolution needs
    # `op: conv`, because as a product it takes the memory of its input times the positions in its kernel.
    op: Annotated[OneOrMore[Op], must_be("linear, matmul, grouped, sdpa, conv or a list of these")] | None = Field(
        None,
        description="Kinds of operation. By default a rule that quantizes matches linear, matmul and grouped (products "
        "of experts), and a rule that keeps matches every kind.",
    )
    module: Globs | None = Field(
        None,
        description="Globs for the module's full name; one match is enough. * matches any text, dots included, and "
        "[0-5] one character. The name that a module had before PEFT wrapped it matches too.",
    )
    block: StrictBool | None = Field(None, description="Whether the site is inside a repeated stack of blocks.")
    first_blocks: Blocks | None = Field(
        None,
        description="The site is in the first blocks of its stack: a number of blocks, or a share of them below 1, "
        "rounded up to whole blocks.",
    )
    last_blocks: Blocks | None = Field(None, description="The same for the last blocks of the stack.")
    in_features: Range | None = Field(None, description="Size K of the product; a symbolic size never matches.")
    out_features: Range | None = Field(None, description="Size N of the product; a symbolic size never matches.")
    min_numel: Count | None = Field(None, description="The smallest number of elements of the second factor.")
    producer: Texts | None = Field(None, description="Operations that may have computed the input.")
    role: Annotated[OneOrMore[Role], must_be("adapter, router, head or a list of these")] | None = Field(
        None,
        description="Roles of the site: adapter (LoRA and the like), router (of a mixture of experts), head. By "
        "default a rule that quantizes excludes routers, and adapters unless module names them.",
    )

    @model_validator(mode="after")
    def _can_match(self) -> Self:
        if self.block is False and (self.first_blocks or self.last_blocks):
            raise ValueError("block: false contradicts first_blocks and last_blocks; remove one of them")
        if self.op == ():
            raise ValueError("an empty op matches nothing; leave it out for linear, matmul and grouped")
        if misread := misread_range(self.module or ()):
            raise ValueError(f"{misread}; or use first_blocks or last_blocks")
        return self

    def __str__(self) -> str:
        words = [
            f"{name} {' or '.join(value) if isinstance(value, tuple) else str(value).lower()}"
            for name, value in self.predicates.items()
        ]
        return ", ".join(words) or "every site"

    @property
    def predicates(self) -> dict[str, Any]:
        """The predicates that are not None, by name."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    def fits(self, site: SiteView) -> bool:
        """Return whether the predicates on sizes and producer hold for ``site``."""
        return (
            (self.in_features is None or site.in_features in self.in_features)
            and (self.out_features is None or site.out_features in self.out_features)
            and (self.min_numel is None or (site.numel is not None and site.numel >= self.min_numel))
            and (self.producer is None or site.producer in [PRODUCERS.get(name, name) for name in self.producer])
        )

    @property
    def fits_all(self) -> bool:
        """Return whether :meth:`fits` holds for every site."""
        sizes = (self.in_features, self.out_features, self.min_numel)
        return self.producer is None and all(size is None for size in sizes)

    def holds_at(self, site: SiteView) -> bool:
        """Return whether the predicates on the site's place, its module and its block of the model, hold."""
        block = site.block
        return (
            self.may_name(site.module)
            and (self.block is None or self.block == (block is not None))
            and (self.first_blocks is None or (block is not None and block.index < self.first_of(block.total)))
            and (
                self.last_blocks is None
                or (block is not None and block.index >= block.total - self.last_of(block.total))
            )
        )

    def first_of(self, total: int) -> int:
        """Return how many of the first blocks of a stack of ``total`` match; all if ``first_blocks`` is None."""
        return _blocks(self.first_blocks, total)

    def last_of(self, total: int) -> int:
        """Return how many of the last blocks of a stack of ``total`` match; all if ``last_blocks`` is None."""
        return _blocks(self.last_blocks, total)

    @property
    def names_adapters(self) -> bool:
        """Return whether all ``module`` globs name adapters."""
        return self.module is not None and all(map(names_adapters, self.module))

    @property
    def needs_blocks(self) -> bool:
        """Return whether a predicate holds only inside a repeated stack of blocks."""
        return bool(self.block) or self.first_blocks is not None or self.last_blocks is not None

    def may_name(self, module: str | None) -> bool:
        """Return whether a ``module`` glob matches ``module``, or the rule has no globs."""
        return self.module is None or self.names(module)

    def names(self, module: str | None) -> bool:
        """Return whether a ``module`` glob matches ``module``, or a name that it may have had before PEFT."""
        names = () if module is None else names_before(module)
        return any(fnmatch.fnmatchcase(name, glob) for name in names for glob in self.module or ())
