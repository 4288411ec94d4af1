"""Oscillation at the end of a training, with and without TetraJet's remedies (its Figure 6 and Table 3, small).

    python examples/findings/oscillation.py           # 3 seeds, minutes on one CPU core

Trains a ViT of two blocks on handwritten digits for 20 epochs, with a cosine down to a hundredth of the learning rate.
Measures over the last 100 steps: the share of weights with R_w > 16, flips per weight and step, and the rates of change
of W, of Q(W), and of the sites' outputs Y for 64 fixed inputs of Gaussian noise (over the last 5 steps).
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from finished import DIVERGED, finished, markdown

from fp4graph.lab import Statistics, read
from fp4graph.lab.runs.train import Run, train

STEPS, WINDOW = 440, 100
#: Schedules have the length of this training; the last detection of Q-Ramping ends before the window begins.
RAMPING = {"q_ramping": {"t_update": 150, "n_max": 120, "t0": 30}}
DAMPEN = {"dampen": {"strength": 0.01, "total_steps": STEPS, "start": 0.25}}
FALLING = {"threshold": 0.1, "final_threshold": 0.02, "total_steps": STEPS, "start": 0.25}
FREEZE = {"freeze": {"momentum": 0.02, **FALLING}}


def extended(*techniques: Any) -> dict[str, Any]:
    return {"version": 1, "name": "tetrajet-extended", "extends": "tetrajet", "techniques": list(techniques)}


POLICIES: dict[str, Any] = {
    "tetrajet": "tetrajet",
    "+ Q-EMA, β = 0.998": "tetrajet-qema",
    "+ Q-EMA, β = 0.98": extended({"q_ema": {"beta": 0.98}}),
    "+ Q-Ramping": extended(RAMPING),
    "+ Dampen": extended(DAMPEN),
    "+ Freeze": extended(FREEZE),
    "without weight quantizers": "tetrajet-no-wq",
}
COLUMNS = ("oscillating", "flips", "rate_of_change", "quantized_rate_of_change")


def measure(policy: Any, seed: int) -> dict[str, float]:
    """Return means over the sites, in the last window and the last record; nothing if the training diverged."""
    with tempfile.TemporaryDirectory() as directory:

        def watch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Statistics:
            probe = (torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0)),)
            options: dict[str, Any] = {"window": WINDOW, "window_every": STEPS, "probe": probe, "sample": None}
            return Statistics(model, optimizer, every=20, directory=directory, **options)

        run = Run("digits", policy=policy, seed=seed, steps=STEPS, schedule="cosine", device="cpu", backend="eager")
        outcome = train(run, watch=watch)
        if outcome.diverged:
            return {}
        recorded = read(directory)
    last = [row for row in recorded.rows if row["step"] == STEPS]
    measured = {column: [row[column] for row in last if row["tensor"] == "weight"] for column in COLUMNS}
    measured["output_rate_of_change"] = [row["rate_of_change"] for row in last if row["tensor"] == "output"]
    measured["confidence"] = [row["confidence"] for row in last if "confidence" in row]
    means = {name: statistics.fmean(values) for name, values in measured.items() if values}
    return means | {"validation_loss": outcome.validation_loss, "accuracy": outcome.metrics["accuracy"]}


def main(
    output: Annotated[Path, typer.Option(help="File of results.")] = Path("runs/findings/oscillation.jsonl"),
    seeds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    runs = [{"policy": name, "seed": seed} for seed in range(seeds) for name in POLICIES]
    done = finished(output, runs, lambda policy, seed: measure(POLICIES[policy], seed))
    heads = ("policy", "R_w > 16", "flips", "r(W)", "r(Q(W))", "r(Y)", "confidence", "val. loss", "accuracy")
    keys = (*COLUMNS, "output_rate_of_change", "confidence", "validation_loss", "accuracy")
    rows = []
    for name in POLICIES:
        of_seeds = [done[name, seed] for seed in range(seeds)]
        if any("validation_loss" not in row for row in of_seeds):
            rows.append([name, *[DIVERGED] * len(keys)])
            continue
        rows.append([name, *(_cell([row[key] for row in of_seeds if key in row], key) for key in keys)])
    print(markdown(heads, rows))


def _cell(values: list[float], key: str) -> str:
    if not values:
        return "-"
    factor, form = (100, ".2f") if key in ("oscillating", "flips", "accuracy") else (1, ".4f")
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    unit = " %" if factor == 100 else ""
    return f"{factor * statistics.fmean(values):{form}}{unit} ± {factor * spread:{form}}"


if __name__ == "__main__":
    typer.run(main)
