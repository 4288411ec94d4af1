"""The cost of a training step of a model that no compiler captures: a DeiT-Tiny at 224 x 224.

    python -m benchmarks.uncompiled [--policies microscaling,tetrajet] [--batch 8] [--rounds 5]

Four kinds of steps alternate in one process: the plain model without a compiler, the applied model captured (by the
backend ``eager`` and by Inductor), and the applied model uncompiled, as it runs after torch.compile gave up. Times are
medians over the rounds, ratios relative to the plain step.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from typing import Annotated, Literal

import timm
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

import fp4graph

PLAIN, EAGER, INDUCTOR, UNCOMPILED = "plain", "backend eager", "Inductor", "uncompiled"


def measure(policy: str, model: str, batch: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each kind of step."""
    images, labels = torch.randn(batch, 3, 224, 224), torch.arange(batch)

    def stepping(backend: str | None, stance: Literal["default", "force_eager"] = "default") -> Callable[[], float]:
        torch.manual_seed(0)
        trained = timm.create_model(model)
        if backend is not None:
            trained = fp4graph.apply(trained, policy, backend=backend)

        def step() -> float:
            begin = time.perf_counter()
            with torch.compiler.set_stance(stance):
                cross_entropy(trained(images), labels).backward()  # type: ignore[no-untyped-call]
            trained.zero_grad()
            return 1000 * (time.perf_counter() - begin)

        return step

    steps = {
        PLAIN: stepping(None),
        EAGER: stepping("eager"),
        INDUCTOR: stepping("inductor"),
        UNCOMPILED: stepping("eager", "force_eager"),
    }
    for step in steps.values():
        step(), step()  # compiles
    times = [{name: step() for name, step in steps.items()} for _ in range(rounds)]
    return {name: statistics.median(round_times[name] for round_times in times) for name in steps}


def main(
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = "microscaling,tetrajet",
    model: Annotated[str, typer.Option(help="A model of timm.")] = "deit_tiny_patch16_224",
    batch: Annotated[int, typer.Option(min=1)] = 8,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    warnings.simplefilter("ignore", fp4graph.PolicyWarning)
    table = Table(title=f"forward and backward of {model}, batch {batch}, {torch.get_num_threads()} thread(s)")
    for column in ("policy", f"{PLAIN}, ms", EAGER, INDUCTOR, UNCOMPILED):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in policies.split(","):
        times = measure(policy, model, batch, rounds)
        ratios = (f"{times[name] / times[PLAIN]:.2f}×" for name in (EAGER, INDUCTOR, UNCOMPILED))
        table.add_row(policy, f"{times[PLAIN]:.0f}", *ratios)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    typer.run(main)
