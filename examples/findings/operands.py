"""Measures the loss that each operand costs: TetraJet's Table 1 and the per-GEMM ablation, on a small ViT and digits.

    python examples/findings/operands.py              # 3 seeds of tetrajet and mxfp4, half an hour on one CPU core

All trainings of a seed begin with the same weights and see the same batches. A restarted script only runs the missing
trainings.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table

from fp4graph.errors import Error
from fp4graph.files import read_json, write
from fp4graph.lab.runs.train import Run, train
from fp4graph.lab.variants import variants
from fp4graph.policy import Policy

Curve = list[tuple[int, float]]


def curve(policy: Policy, seed: int, file: Path) -> Curve:
    """Return the validation losses of one training, by step; ``file`` keeps them."""
    if not file.exists():
        document = yaml.safe_load(policy.to_yaml())
        run = Run("digits", policy=document, seed=seed, device="cpu", backend="eager", steps=440, validate_every=44,
                  schedule="cosine")  # fmt: skip
        write(file, json.dumps([(entry.step, entry.validation_loss) for entry in train(run).history]))
    return [(step, loss) for step, loss in read_json(file)]


def reached(losses: Curve, target: float) -> float | None:
    """Return the step at which a curve first reaches ``target``, linear between validations, or None."""
    before: tuple[float, float] | None = None
    for step, loss in losses:
        if loss <= target:
            return step if before is None else step - (step - before[0]) * (target - loss) / (before[1] - loss)
        before = step, loss
    return None


def comparison(name: str, curves: dict[str, list[Curve]]) -> Table:
    """Return a table of each variant's curves, a curve per seed. The target is a loss that all mean curves reach."""
    steps = max(len(losses) for each in curves.values() for losses in each)
    lost = {
        variant
        for variant, each in curves.items()
        if any(len(losses) < steps or not math.isfinite(losses[-1][1]) for losses in each)
    }
    if "none" in lost:
        raise Error(f"{name} diverged with nothing quantized, so nothing compares with it; lower its learning rate")
    means = {
        variant: [(points[0][0], statistics.fmean(loss for _, loss in points)) for points in zip(*each, strict=True)]
        for variant, each in curves.items()
        if variant not in lost
    }
    target = max(min(loss for _, loss in mean) for mean in means.values())
    base = reached(means["none"], target) or 1.0
    seeds = len(curves["none"])
    table = Table(title=f"{name}, one part at a time: {seeds} seeds, target loss {target:.4g}", title_justify="left")
    for column in ("quantized", "final loss", "± sd", "excess over none", "± sd", "step to target", "extra"):
        table.add_column(column, justify="left" if column == "quantized" else "right")
    for variant, each in curves.items():
        if variant in lost:
            table.add_row(variant, *["diverged"] * 6)
            continue
        finals = [losses[-1][1] for losses in each]
        excess = [final - losses[-1][1] for final, losses in zip(finals, curves["none"], strict=True)]
        pairs = ((statistics.fmean(x), statistics.stdev(x) if x[1:] else 0.0) for x in (finals, excess))
        step = reached(means[variant], target) or 0.0
        (final, spread), (more, more_spread) = pairs
        numbers = f"{final:.4f}", f"{spread:.4f}", f"{more:+.4f}", f"{more_spread:.4f}", f"{step:,.0f}"
        table.add_row(variant, *numbers, f"{step / base - 1:+.0%}")
    return table


def main(
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = "tetrajet,mxfp4",
    seeds: Annotated[int, typer.Option(min=1)] = 3,
    output: Annotated[Path, typer.Option(help="Folder of the curves.")] = Path("runs/findings/operands"),
) -> None:
    for name in policies.split(","):
        parts = variants(name, "operand") | variants(name, "gemm")
        curves = {
            variant: [curve(policy, seed, output / f"{policy.fingerprint[:16]}-{seed}.json") for seed in range(seeds)]
            for variant, policy in parts.items()
        }
        Console(width=120).print(comparison(name, curves))


if __name__ == "__main__":
    typer.run(main)
