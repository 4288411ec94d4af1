"""How a policy is applied to a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class ApplyOptions:
    """How a policy is applied: the arguments of :func:`fp4graph.apply` beside model and policy.

    ``recompile_limit`` None is 64, or torch's own where that is higher. ``compiler`` are options of Inductor: what
    ``mode`` and ``options`` ask for.
    """

    backend: str = "inductor"
    seed: int = 0
    dynamic: bool | None = None
    total_forwards: int | None = None
    strict: bool = False
    recompile_limit: int | None = None
    methods: tuple[str, ...] = ()
    compiler: Mapping[str, Any] = dataclasses.field(default_factory=dict)
