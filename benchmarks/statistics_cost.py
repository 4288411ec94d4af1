"""What statistics cost the demo's training: the ViT of the task digits-augmented, batches of 64, on ``make demo``'s
eager backend unless another is given (under one that compiles, recorded steps run without the compiler).

    python -m benchmarks.statistics_cost [--policies microscaling,tetrajet] [--backend inductor]

A training with statistics and one without make their steps by turns. Times are the clock's, so nothing else should run.
Steps are of five kinds: ordinary ones; those that are recorded; those of a window, in which weights are followed; those
at its end, in which a probe of 8 images is run as well; those that are recorded and end a window. The share of the step
time at the defaults (every 50th step recorded, 30 steps of 500 in a window) is the mean of their extras, weighted by
460, 9, 25, 5 and 1 of 500, over the ordinary step, all from medians. What it takes once, capturing the graphs of
recorded steps and of the probe, is in the table by itself.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from typing import Annotated, Any

import timm
import torch
import typer
from rich.console import Console
from rich.table import Table
from torch.nn.functional import cross_entropy

import fp4graph
from fp4graph.analysis import Statistics
from fp4graph.analysis.collect import PROBED

DEFAULT = "microscaling,tetrajet,tetrajet-qema"
EVERY, WINDOW, WINDOW_EVERY = 50, 30, 500
_RECORDED = 40  # recorded steps are EVERY_HERE apart, and each second of them ends a window of WINDOW_HERE steps
EVERY_HERE, WINDOW_HERE = 12, 10


def training(policy: str, backend: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The demo's model on digits, prepared."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"img_size": 16, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, in_chans=1, **options)
    model = fp4graph.apply(model, policy, backend=backend)
    return model, fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05))


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Seconds of one."""
    begin = time.perf_counter()
    loss = cross_entropy(model(images), labels)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return time.perf_counter() - begin


def measure(policy: str, batch: int, backend: str) -> dict[str, float]:
    """Milliseconds: of an ordinary step, and what each kind takes more, medians of pairs; and the share in percent."""
    plain, watched = training(policy, backend), training(policy, backend)
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(batch, 1, 16, 16, generator=generator), torch.arange(batch) % 10
    extra: dict[str, list[float]] = defaultdict(list)
    ordinary = []
    for model, optimizer in (plain, watched):
        for _ in range(3):
            step(model, optimizer, images, labels)
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {
            "every": EVERY_HERE,
            "window": WINDOW_HERE,
            "window_every": 2 * EVERY_HERE,
            "step": 0,
        }
        with Statistics(*watched, directory=directory, probe=(images[:8],), **options):
            for number in range(1, EVERY_HERE * _RECORDED + 1):
                base, own = step(*plain, images, labels), step(*watched, images, labels)
                ordinary.append(base)
                left = -number % (2 * EVERY_HERE)  # steps until a window ends
                if number == EVERY_HERE:
                    extra["first"].append(own - base)
                elif left == 0:
                    extra["both"].append(own - base)
                elif number % EVERY_HERE == 0:
                    extra["recorded"].append(own - base)
                elif left <= PROBED:
                    extra["probed"].append(own - base)
                elif left <= WINDOW_HERE:  # where it opens, weights are looked at too
                    extra["window"].append(own - base)
                else:
                    extra["ordinary"].append(own - base)
    result = {name: 1000 * statistics.median(values) for name, values in extra.items()}
    result["step"] = 1000 * statistics.median(ordinary)
    counts = {"recorded": WINDOW_EVERY // EVERY - 1, "window": WINDOW - PROBED, "probed": PROBED, "both": 1}
    counts["ordinary"] = WINDOW_EVERY - sum(counts.values())
    # An ordinary step cannot gain by statistics: what looks so is noise.
    per_step = sum(max(0.0, result[name]) * count for name, count in counts.items()) / WINDOW_EVERY
    return result | {"share": 100 * per_step / result["step"]}


def main(
    policies: Annotated[str, typer.Option(help="Names, with commas between them.")] = DEFAULT,
    batch: Annotated[int, typer.Option(min=16)] = 64,
    backend: Annotated[str, typer.Option(help="Of torch.compile.")] = "eager",
) -> None:
    console = Console(highlight=False)
    table = Table(title=f"statistics of the demo, {backend}, {torch.get_num_threads()} thread(s), medians in ms")
    kinds = ("recorded +", "window +", "its end +", "both +", "other +")
    for column in ("policy", "step", *kinds, "once", "share at defaults"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for policy in policies.split(","):
        m = measure(policy, batch, backend)
        cells = (f"{m[name]:.1f}" for name in ("step", "recorded", "window", "probed", "both", "ordinary", "first"))
        table.add_row(policy, *cells, f"{m['share']:.2f} %")
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
