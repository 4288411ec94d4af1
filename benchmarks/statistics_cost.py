"""The cost of statistics in a training: a DeiT-Tiny at 224 x 224 in batches of 16.

    python -m benchmarks.statistics_cost [--policies microscaling,tetrajet] [--backend inductor] [--steps 6]

One model trains with statistics switched on and off in turn, so that all kinds of steps share the machine's state.
Times are wall times, so nothing else should run. Four kinds of steps are measured: ordinary steps, recorded steps,
steps of a window, in which weights are followed, and steps at a window's end, which also run a probe of 8 images. The
cost at the defaults (every 50th step recorded, 30 steps of 500 in a window, 5 of them with the probe) is the mean extra
time per step, relative to the ordinary step, all from medians. Recorded steps run without the compiler.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Annotated, Any

import timm
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

import fp4graph

EVERY, WINDOW, WINDOW_EVERY = 50, 30, 500  # the defaults
#: The last steps of each window, at which the rate of change reads the outputs of the probe.
PROBED = fp4graph.lab.Statistics.PROBED


def measure(policy: str, model_name: str, batch: int, backend: str, steps: int) -> dict[str, float]:
    """Return median milliseconds of each kind of step, and the cost at the defaults in percent."""
    torch.manual_seed(0)
    model = fp4graph.apply(timm.create_model(model_name), policy, backend=backend)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.05))
    images, labels = torch.randn(batch, 3, 224, 224), torch.arange(batch)

    def step() -> float:
        begin = time.perf_counter()
        loss = cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return 1000 * (time.perf_counter() - begin)

    def watched(number: int, **options: Any) -> list[float]:
        with (
            tempfile.TemporaryDirectory() as folder,
            fp4graph.lab.Statistics(model, optimizer, directory=folder, step=0, **options),
        ):
            return [step() for _ in range(number)]

    step(), step()
    never = 10**6
    times: dict[str, list[float]] = {"step": [], "recorded": [], "window": [], "probed": []}
    for _ in range(3):
        times["step"] += [step() for _ in range(steps)]
        # The first observed step and the first probe capture graphs.
        times["recorded"] += watched(steps + 1, every=1, window_every=never, metrics=_without_windows())[1:]
        times["window"] += watched(steps + 1, every=never, window=steps + 1, window_every=steps + 1)[1:]
        probed = watched(PROBED, every=never, window=PROBED, window_every=PROBED, probe=(images[:8],))
        times["probed"] += probed[1:]
    medians = {name: statistics.median(values) for name, values in times.items()}
    extra = {name: max(0.0, value - medians["step"]) for name, value in medians.items()}
    per_step = extra["recorded"] / EVERY
    per_step += (extra["window"] * (WINDOW - PROBED) + extra["probed"] * PROBED) / WINDOW_EVERY
    return medians | {"share": 100 * per_step / medians["step"]}


def _without_windows() -> set[str]:
    return set(fp4graph.lab.METRICS) - {"oscillation", "flips", "rate_of_change"}


def main(
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = "microscaling,tetrajet,nvfp4",
    model: Annotated[str, typer.Option(help="A model of timm.")] = "deit_tiny_patch16_224",
    batch: Annotated[int, typer.Option(min=8)] = 16,
    backend: Annotated[str, typer.Option(help="Backend of torch.compile.")] = "eager",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each kind, in each of three rounds.")] = 4,
) -> None:
    console = Console(highlight=False)
    threads = torch.get_num_threads()
    table = Table(title=f"statistics of {model}, batch {batch}, {backend}, {threads} thread(s), medians in ms")
    for column in ("policy", "step", "recorded", "window", "window's end", "cost at defaults"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in policies.split(","):
        m = measure(policy, model, batch, backend, steps)
        cells = (f"{m[name]:.0f}" for name in ("step", "recorded", "window", "probed"))
        table.add_row(policy, *cells, f"{m['share']:.2f} %")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
