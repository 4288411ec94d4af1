"""Measures scale bias, dead zone and grid noise on a training's tensors, with and without techniques against them.

    python examples/findings/decomposition.py         # a minute or two on one CPU core

The script trains a ViT of two blocks on handwritten digits under pure MXFP4 (mxfp4-full). At five steps near the end
it quantizes the six operands of every quantized site with each recipe, so that all recipes see the same tensors. MXFP4
has the scales of the OCP specification; NVFP4 has decode scales rounded to nearest, as in hardware. Macro-block scaling
needs power-of-two scales. Squared errors are relative to the operand's squared norm, averaged over sites and steps. The
three parts add up to the error minus twice the product of scale bias and grid noise; the picture divides each error in
the ratio of its parts.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from fp4graph.lab import decompose
from fp4graph.lab.pictures.panels import error_panels
from fp4graph.lab.pictures.style import LABELS, styled, subplots
from fp4graph.lab.runs.train import Run, train
from fp4graph.model.runtime import runtime_of
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.observe import ObservedOperand
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique import parts_of
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import default_registry

STEPS = 440
OBSERVED = range(360, STEPS + 1, 20)
MXFP4 = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "floor"))  # type: ignore[arg-type]
NVFP4 = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"))  # type: ignore[arg-type]
#: The quantizer of all six operands and additional techniques, by name.
RECIPES: dict[str, tuple[QuantSpec, tuple[str, ...]]] = {
    "MXFP4": (MXFP4, ()),
    "+ macro-block scaling": (MXFP4, ("macro_block_scaling",)),
    "+ outlier fallback": (MXFP4, ("outlier_fallback",)),
    "+ both": (MXFP4, ("macro_block_scaling", "outlier_fallback")),
    "NVFP4": (NVFP4, ()),
    "+ tensor scale": (NVFP4, ("tensor_scaling",)),
    "+ tensor scale, fallback": (NVFP4, ("tensor_scaling", "outlier_fallback")),
}
COLUMNS = ("total", "scale_bias", "dead_zone", "grid_noise")
#: The shares of every site and step, by recipe and operand.
Shares = Mapping[tuple[str, Operand], list[dict[str, float]]]


class OperandErrors:
    """Observes the sites of a forward and its backward, and measures the errors of their operands."""

    def __init__(self) -> None:
        self.programs = {
            (recipe, operand): OperandProgram(
                spec, tuple(part for name in names for part in parts_of(default_registry().techniques[name]()))
            )
            for recipe, (spec, names) in RECIPES.items()
            for operand in Operand
        }
        self.shares: defaultdict[tuple[str, Operand], list[dict[str, float]]] = defaultdict(list)

    def operands(self, site: str) -> Any:
        return self.measure

    def output(self, site: str, y: torch.Tensor) -> None:
        pass

    def measure(self, *sides: ObservedOperand) -> None:
        for seen in sides:
            x = seen.given.detach()
            for recipe in RECIPES:
                parts = decompose(x, self.programs[recipe, seen.operand])
                self.shares[recipe, seen.operand].append(parts.shares(x))


def measure(seed: int = 0) -> Shares:
    """Train, and return the errors of the operands at the steps ``OBSERVED``."""
    errors = OperandErrors()

    @contextmanager
    def watch(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        runtime, next_steps = runtime_of(model), itertools.count(2)

        def after_step(*args: Any) -> None:
            runtime.observe(errors if next(next_steps) in OBSERVED else None)

        optimizer.register_step_post_hook(after_step)
        yield

    train(Run("digits", policy="mxfp4-full", seed=seed, steps=STEPS, schedule="cosine", backend="eager"), watch=watch)
    return errors.shares


def mean(shares: Shares, recipe: str, operand: Operand, column: str) -> float:
    """Return the mean of a column over sites and steps, in percent."""
    return 100 * statistics.fmean(row[column] for row in shares[recipe, operand])


def picture(shares: Shares, file: Path) -> None:
    """Draw bars of the three parts, a panel for each operand."""
    errors = {
        LABELS[operand]: {recipe: {c: mean(shares, recipe, operand, c) for c in COLUMNS} for recipe in RECIPES}
        for operand in Operand
    }
    with styled():
        drawn, panels = subplots(6.4, 2, 3, width=10.0, sharey=True)
        error_panels(drawn, panels, errors, "squared error, % of the signal")
        for axes, bars in zip(panels.flat, errors.values(), strict=True):
            # Without a tensor scale, gradients below the range of E4M3 are lost. That bar is cut and labelled.
            limit = 1.08 * max(error["total"] for recipe, error in bars.items() if recipe != "NVFP4")
            axes.set_xlim(0, limit)
            nvfp4 = bars["NVFP4"]
            if nvfp4["total"] > limit:
                label = f"{nvfp4['total']:.0f} %, dead zone {nvfp4['dead_zone']:.0f} % →"
                place = list(RECIPES).index("NVFP4")
                axes.text(0.98 * limit, place, label, ha="right", va="center", fontsize=8.5, fontweight="bold")
        file.parent.mkdir(parents=True, exist_ok=True)
        drawn.savefig(file, dpi=130)


def main(
    output: Annotated[Path, typer.Option(help="The picture.")] = Path("runs/findings/decomposition-training.png"),
    seed: int = 0,
) -> None:
    shares = measure(seed)
    print("| operand | recipe | error, % | scale bias | dead zone | grid noise |")
    print("| --- | --- | ---: | ---: | ---: | ---: |")
    for operand in Operand:
        for recipe in RECIPES:
            cells = (f"{mean(shares, recipe, operand, column):.3f}" for column in COLUMNS)
            print(f"| {LABELS[str(operand)]} | {recipe} | " + " | ".join(cells) + " |")
    picture(shares, output)
    print(f"\npicture: {output}")


if __name__ == "__main__":
    typer.run(main)
