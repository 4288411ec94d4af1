"""Trains the Gaussian regression of "Elucidating the design space of FP4 training" (appendix, Tables 3 and 8).

    python examples/findings/gaussian.py              # 3 seeds, a quarter of an hour on one CPU core

A restarted script only trains the missing runs, and prints the full table.
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from finished import DIVERGED, finished, markdown

import fp4graph
from fp4graph.lab.runs.train import Run, train
from fp4graph.lab.tasks import TASKS
from fp4graph.lab.tasks.regression import Gaussian


def extended(base: str, *techniques: Any, scale: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a shipped pure policy with other scales or additional techniques."""
    policy: dict[str, Any] = {"version": 1, "name": base, "extends": base, "techniques": list(techniques)}
    if scale is not None:
        (rule,) = yaml.safe_load(fp4graph.load_policy(base).to_yaml())["rules"]
        rule["quantize"]["scale"] |= scale
        policy["rules"] = [rule]
    return policy


DECODE = {"convention": "decode", "rounding": "nearest_even"}
SPLINE = {"step_gradient": {"kind": "spline"}}
#: The techniques of the best NVFP4 recipe besides the spline.
WITHOUT_SPLINE = (
    {"hadamard": {"scope": "backward", "block": 16}}, {"tensor_scaling": {"headroom": 0.5}},
    {"tensor_scaling_gradient": {"kind": "absmax"}}, "loss_scaling",
)  # fmt: skip
STABLE = ("stablespam",)


@dataclass(frozen=True)
class Row:
    """A policy, its optimizers, and the validation losses in the paper by optimizer."""

    label: str
    policy: str | dict[str, Any]
    paper: dict[str, float]
    optimizers: tuple[str, ...] = ("adam", "stablespam")


ROWS = (
    Row("`bf16`: nothing quantized", "bf16", {"adam": 25.520, "stablespam": 0.013}),
    Row("`nvfp4`", "nvfp4", {"adam": 30.125}),
    Row("`nvfp4`, decode scales", extended("nvfp4", scale=DECODE), {"adam": 30.125}),
    Row("`mxfp4`", "mxfp4", {"adam": 34.0}),
    Row("`mxfp4`, decode scales", extended("mxfp4", scale=DECODE), {"adam": 34.0}),
    Row("`mxfp4-round-up`", "mxfp4-round-up", {}),
    Row("`ue5m3`", "ue5m3", {"adam": 31.375}),
    Row("`nvfp4`, stochastic scales", extended("nvfp4", "stochastic_scale_rounding"), {"stablespam": 25.5}, STABLE),
    Row(
        "`nvfp4`, best loss: spline, backward Hadamard, tensor scale with gradient, loss scaling",
        extended("nvfp4", SPLINE, *WITHOUT_SPLINE), {"stablespam": 22.875}, STABLE,
    ),
    Row("`nvfp4`, the same without the spline", extended("nvfp4", *WITHOUT_SPLINE), {}, STABLE),
    Row("`nvfp4`, the spline alone", extended("nvfp4", SPLINE), {}, STABLE),
    Row("`mxfp4-round-up`, tensor scale", extended("mxfp4-round-up", "tensor_scaling"), {"stablespam": 27.875}, STABLE),
    Row(
        "`mxfp4-round-up`, best loss: spline, backward Hadamard, tensor scale",
        extended("mxfp4-round-up", SPLINE, {"hadamard": {"scope": "backward", "block": 32}}, "tensor_scaling"),
        {"stablespam": 27.25}, STABLE,
    ),
)  # fmt: skip
DTYPES = ("bf16", "fp32")
#: The "optimizer" of the true weights, which are not trained.
NONE = "none"


def untrained(row: Row, seed: int) -> float:
    """Return the validation loss of the true weights in fp32 under a row's policy, which no training can avoid."""
    problem = Gaussian(TASKS["gaussian"].settings(Run("gaussian", dtype="fp32", seed=seed, device="cpu")))
    problem.model.weight.data.copy_(problem.w.T)
    problem.model.bias.data.zero_()
    fp4graph.apply(problem.model, row.policy, backend="eager").eval()
    with torch.no_grad():
        full = [batch for batch in problem.validation() if len(batch[0]) == problem.batch_size]
        return torch.cat([problem.measure(problem.model, batch)["loss"] for batch in full]).mean().item()


def table(results: dict[tuple[Any, ...], Any], seeds: int) -> str:
    """Return the validation losses as Markdown: mean ± standard deviation over the seeds."""
    rows = []
    for row in ROWS:
        exact = (results[row.label, NONE, "fp32", seed]["outcome"] for seed in range(seeds))
        floor = statistics.fmean(outcome["validation_loss"] for outcome in exact)
        for optimizer in row.optimizers:
            cells = []
            for dtype in DTYPES:
                runs = [results[row.label, optimizer, dtype, seed] for seed in range(seeds)]
                losses = [run["outcome"]["validation_loss"] for run in runs]
                if None in losses:
                    cells.append(DIVERGED)
                    continue
                spread = f" ± {statistics.stdev(losses):.2g}" if len(losses) > 1 else ""
                cells.append(f"{statistics.fmean(losses):.3g}{spread}")
            paper = f"{row.paper[optimizer]:g}" if optimizer in row.paper else ""
            complexity = results[row.label, optimizer, DTYPES[0], 0]["outcome"]["complexity"]
            rows.append([row.label, optimizer, f"{complexity:g}", paper, *cells, f"{floor:.3g}"])
    heads = ("policy", "optimizer", "Ω", "paper", "bf16 parameters", "fp32 parameters", "the true weights")
    return markdown(heads, rows)


def main(
    seeds: Annotated[int, typer.Option(min=1, help="Each seed has its own data, weights and order.")] = 3,
    output: Annotated[Path, typer.Option(help="File of results.")] = Path("runs/findings/gaussian.jsonl"),
    device: Annotated[str, typer.Option()] = "auto",
) -> None:
    rows = {row.label: row for row in ROWS}
    wanted = [
        {"label": row.label, "optimizer": optimizer, "dtype": dtype, "seed": seed}
        for seed in range(seeds)  # a seed is one data set, made once
        for row in ROWS
        for optimizer, dtype in [(NONE, "fp32"), *itertools.product(row.optimizers, DTYPES)]
    ]

    def outcome(label: str, **options: Any) -> dict[str, Any]:
        if options["optimizer"] == NONE:
            return {"outcome": {"validation_loss": untrained(rows[label], options["seed"])}}
        return {"outcome": train(Run("gaussian", policy=rows[label].policy, device=device, **options)).to_json()}

    print(table(finished(output, wanted, outcome), seeds))


if __name__ == "__main__":
    typer.run(main)
