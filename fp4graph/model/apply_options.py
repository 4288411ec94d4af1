"""The options of :func:`fp4graph.apply`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fp4graph.errors import Error


@dataclasses.dataclass(frozen=True)
class ApplyOptions:
    """The arguments of :func:`fp4graph.apply` beside model and policy; ``compiler`` holds the options of Inductor that
    ``mode`` and ``options`` ask for."""

    backend: str = "inductor"
    seed: int = 0
    dynamic: bool | None = None
    total_forwards: int | None = None
    strict: bool = False
    recompile_limit: int | None = None
    methods: tuple[str, ...] = ()
    compiler: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if type(self.seed) is not int:
            raise Error(f"seed is an int, or None for 0; got {self.seed!r}")
        if not isinstance(self.dynamic, bool | None):
            raise Error(f"dynamic is True, False or None, as for torch.compile; got {self.dynamic!r}")
        if not isinstance(self.strict, bool):
            raise Error(f"strict is True or False; got {self.strict!r}")
        if (total := self.total_forwards) is not None and (type(total) is not int or total < 1):
            raise ValueError(f"total_forwards is a number of training forwards, at least 1; got {total!r}")
        limit = self.recompile_limit
        if limit is not None and (type(limit) is not int or limit < 1):
            raise Error(f"recompile_limit is a number of graphs, at least 1, or None for 64; got {limit!r}")
