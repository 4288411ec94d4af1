"""The left-hand side of a rule: which sites it speaks of."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, fields
from typing import Literal

from fp4graph.technique.site import BlockPosition, SiteView

Op = Literal["linear", "matmul", "sdpa"]


@dataclass(frozen=True)
class Range:
    """Bounds on a whole number, each optional; ``min == max`` asks for one value."""

    min: int | None = None
    max: int | None = None
    multiple_of: int | None = None

    def __contains__(self, value: int | None) -> bool:
        """Whether ``value`` is known and within the bounds: a symbolic size is in no range."""
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


@dataclass(frozen=True, kw_only=True)
class Match:
    """Predicates on a site, all of which must hold; one that is None holds for every site.

    Attributes:
        op: kinds of operation. None is linear and matmul for a rule that quantizes: fused attention is taken apart only
            for a rule that says ``op: sdpa``, since that costs O(N²) memory. None is every kind for a rule that keeps.
        module: globs for the whole fully qualified name, any of which will do. Case-sensitive; ``*`` matches any
            text, dots included, so ``*.attn.qkv`` is every block's and ``head`` only the top-level head.
        block: whether the site is inside a repeated stack of blocks.
        first_blocks, last_blocks: the site is inside the first or last so many blocks of its stack. Both together
            ask for both; write two rules for either.
        in_features, out_features, min_numel: sizes K and N of the product, and elements of its second factor. A size
            that is symbolic in the captured graph satisfies none of them.
        producer: operations that may have made the input.
    """

    op: tuple[Op, ...] | None = None
    module: tuple[str, ...] | None = None
    block: bool | None = None
    first_blocks: int | None = None
    last_blocks: int | None = None
    in_features: Range | None = None
    out_features: Range | None = None
    min_numel: int | None = None
    producer: tuple[str, ...] | None = None

    def __str__(self) -> str:
        predicates = {item.name: getattr(self, item.name) for item in fields(self)}
        words = [
            f"{name} {' or '.join(value) if isinstance(value, tuple) else str(value).lower()}"
            for name, value in predicates.items()
            if value is not None
        ]
        return ", ".join(words) or "every site"

    def fits(self, site: SiteView) -> bool:
        """Whether every predicate holds for ``site`` but those on the kind of operation and on the place."""
        return (
            (self.in_features is None or site.in_features in self.in_features)
            and (self.out_features is None or site.out_features in self.out_features)
            and (self.min_numel is None or site.numel in Range(min=self.min_numel))
            and (self.producer is None or site.producer in self.producer)
        )

    @property
    def fits_all(self) -> bool:
        """Whether :meth:`fits` holds for every site."""
        sizes = (self.in_features, self.out_features, self.min_numel)
        return self.producer is None and all(size is None for size in sizes)

    def holds_at(self, module: str | None, block: BlockPosition | None) -> bool:
        """Whether the predicates on the place hold for a site of ``module``."""
        return (
            (self.module is None or self.names(module))
            and (self.block is None or self.block == (block is not None))
            and (self.first_blocks is None or (block is not None and block.index < self.first_blocks))
            and (self.last_blocks is None or (block is not None and block.index >= block.total - self.last_blocks))
        )

    @property
    def needs_blocks(self) -> bool:
        """Whether it asks for a site inside a repeated stack of blocks."""
        return bool(self.block) or self.first_blocks is not None or self.last_blocks is not None

    def names(self, module: str | None) -> bool:
        """Whether one of the ``module`` globs is the name of ``module``."""
        return module is not None and any(fnmatch.fnmatchcase(module, glob) for glob in self.module or ())
