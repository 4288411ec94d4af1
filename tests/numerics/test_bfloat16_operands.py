"""How many values of each operand bf16 rounds once more: the table of docs/parity.md.

``python -m tests.numerics.test_bfloat16_operands`` prints its rows, for every shipped policy.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import fp4graph
from fp4graph.ops.observe import ObservedOperand, observed
from tests.recipes.linear import IN, OUT, TOKENS, Data, applied, step
from tests.recipes.shipped import POLICIES, experts_at

PAGE = Path(__file__).parents[2] / "docs/parity.md"
#: The operands that one column of the table speaks of, in TetraJet's order.
COLUMNS = ("fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")


def gaussian() -> Data:
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, IN), (OUT, IN), (TOKENS, OUT)
    return Data(*(torch.randn(s, generator=generator).bfloat16().double().numpy() for s in shapes))


def shares(policy: str) -> dict[str, float]:
    """Return by operand the share of values, in the operand's quantized term, that bf16 does not represent.

    Where experts and linears have different quantizers, it is the larger share.
    """
    found: dict[str, float] = {}

    def see(*operands: ObservedOperand) -> None:
        for own in operands:
            if own.program.spec is not None:
                values = own.terms[0].values.numpy().astype(np.float32)
                low = values.view(np.uint32) & 0xFFFF  # a bf16 number is an fp32 without these bits
                share = float((low != 0).mean())
                found[str(own.operand)] = max(share, found.get(str(own.operand), 0.0))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with observed(see):
            step(applied(policy, gaussian(), experts_at(policy)), gaussian())
    return found


def row(policy: str) -> str:
    found = shares(policy)
    return " | ".join(f"{100 * found[name]:.0f} %" if name in found else "–" for name in COLUMNS)


@pytest.mark.parametrize("policy", ["averis", "if4", "nvfp4-rl", "wang-dge"])
def test_the_rows_of_the_page(policy):
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{policy}`")]
    (cells,) = (cells for cells in (line.strip("| ").split(" | ") for line in lines) if len(cells) == 9)
    found = shares(policy)
    for name, cell in zip(COLUMNS, cells[1:7], strict=True):
        assert (name in found) == (cell != "–")
        if name in found:
            assert 100 * found[name] == pytest.approx(float(cell.split()[0]), abs=2), name


if __name__ == "__main__":
    rows: dict[str, list[str]] = {}
    for shipped in POLICIES:
        if fp4graph.load_policy(shipped).quantizes:
            rows.setdefault(row(shipped), []).append(f"`{shipped}`")
    for cells, names in rows.items():
        print(f"| {', '.join(names)} | {cells} |")
