"""Which operand hurts most: TetraJet's Table 1 and the per-GEMM ablation, on a small ViT and handwritten digits.

    python examples/findings/operands.py              # 3 seeds of tetrajet and mxfp4, half an hour on one CPU core

All trainings of a seed begin with the same weights and see the same batches. The script keeps finished trainings;
started again, it runs the missing ones only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from fp4graph.lab.ablation import ablation
from fp4graph.lab.runs.train import Run, train
from fp4graph.policy import Policy


def curve(policy: Policy, seed: int) -> list[tuple[float, float]]:
    """Return the validation losses of one training, by step."""
    schedule: dict[str, Any] = {"steps": 440, "validate_every": 44, "schedule": "cosine"}
    document = yaml.safe_load(policy.to_yaml())
    run = Run("digits", policy=document, seed=seed, device="cpu", backend="eager", **schedule)
    return [(entry.step, entry.validation_loss) for entry in train(run).history]


def main(
    policies: Annotated[str, typer.Option(help="Names, with commas between them.")] = "tetrajet,mxfp4",
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    output: Annotated[Path, typer.Option(help="Folder of the curves.")] = Path("runs/findings/operands"),
) -> None:
    for name in policies.split(","):
        result = ablation(name, curve, seeds=range(seeds), directory=output / name)
        Console(width=120).print(result.table())


if __name__ == "__main__":
    typer.run(main)
