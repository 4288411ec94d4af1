"""The share of values in each operand that bf16 rounds once more: the table of docs/parity.md.

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
#: The operands of the table's columns, Q1 to Q6.
COLUMNS = ("fprop.input", "fprop.weight", "dgrad.grad_output", "dgrad.weight", "wgrad.grad_output", "wgrad.input")


def gaussian() -> Data:
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, IN), (OUT, IN), (TOKENS, OUT)
    return Data(*(torch.randn(s, generator=generator).bfloat16().double().numpy() for s in shapes))


def shares(policy: str) -> dict[str, float]:
    """Return, for each quantized operand, the share of its values that bf16 does not represent.

    Where experts and linears have different quantizers, return the larger share.
    """
    largest: dict[str, float] = {}

    def see(*operands: ObservedOperand) -> None:
        for operand in operands:
            if operand.program.spec is not None:
                values = operand.terms[0].values.numpy().astype(np.float32)
                low = values.view(np.uint32) & 0xFFFF  # a bf16 number is an fp32 without these bits
                share = float((low != 0).mean())
                name = str(operand.operand)
                largest[name] = max(share, largest.get(name, 0.0))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with observed(see):
            step(applied(policy, gaussian(), experts_at(policy)), gaussian())
    return largest


def row(policy: str) -> str:
    measured = shares(policy)
    return " | ".join(f"{100 * measured[name]:.0f} %" if name in measured else "–" for name in COLUMNS)


@pytest.mark.parametrize("policy", ["averis", "if4", "nvfp4-rl", "wang-dge"])
def test_the_page_states_the_measured_shares(policy):
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| `{policy}`")]
    (cells,) = (cells for cells in (line.strip("| ").split(" | ") for line in lines) if len(cells) == 9)
    measured = shares(policy)
    for name, cell in zip(COLUMNS, cells[1:7], strict=True):
        assert (name in measured) == (cell != "–")
        if name in measured:
            assert 100 * measured[name] == pytest.approx(float(cell.split()[0]), abs=2), name


if __name__ == "__main__":
    rows: dict[str, list[str]] = {}
    for shipped in POLICIES:
        if fp4graph.load_policy(shipped).quantizes:
            rows.setdefault(row(shipped), []).append(f"`{shipped}`")
    for cells, names in rows.items():
        print(f"| {', '.join(names)} | {cells} |")
