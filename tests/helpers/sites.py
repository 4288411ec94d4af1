"""Programs of single sites, without a model around them."""

from __future__ import annotations

from typing import Any

import fp4graph
from fp4graph.graph.plan import plan_site
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.technique.site import BlockPosition, SiteView


def program_of(
    policy: Any, op: str = "linear", inputs: int = 64, outputs: int = 96, producer: str | None = None
) -> MatmulProgram:
    """Return the program of a site under the first rule of ``policy`` that quantizes; a linear is in the middle of a
    stack of blocks."""
    rule = next(rule for rule in fp4graph.load_policy(policy).rules if rule.quantizes)
    block = BlockPosition("blocks", 5, 12) if op == "linear" else None
    numel = None if op == "matmul" else inputs * outputs
    program = plan_site(SiteView("blocks.5.fc", op, inputs, outputs, numel, block, producer), rule).program
    assert program is not None
    return program
