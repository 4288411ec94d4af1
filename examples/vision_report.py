"""What examples/pretrain_vit.py reports: a JSON log, a picture of the loss curves, a closing table."""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table


@dataclass
class Run:
    """What one policy came to.

    Attributes:
        policy, complexity: its name and Ω.
        quantized, sites: matrix products of the model that the policy quantizes, and all that were captured.
        train_loss, validation_loss, top1: one value per epoch; losses are means over the epoch's images.
        first_step_seconds: of the first training step, which holds the compilation.
        step_seconds: median of the timed steps: forward, backward and optimizer, without data loading. None before.
        total_seconds: from building the model to the last validation.
    """

    policy: str
    complexity: float
    quantized: int
    sites: int
    train_loss: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    first_step_seconds: float | None = None
    step_seconds: float | None = None
    total_seconds: float = 0.0


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A temporary path beside ``file`` that takes its place once the block has ended well, so that a reader, or a run
    that is killed, never sees half a file."""
    umask = os.umask(0)
    os.umask(umask)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    temporary = Path(name)
    try:
        os.fchmod(handle, 0o666 & ~umask)  # mkstemp's files are private; results are not
        os.close(handle)
        yield temporary
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def write_log(runs: Sequence[Run], context: Mapping[str, Any], file: Path) -> None:
    """``context`` and the runs so far as JSON; a loss that is not finite becomes null, which JSON has a word for."""
    content = _finite({**context, "runs": [asdict(run) for run in runs]})
    with replacing(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return value


def closing_table(runs: Sequence[Run], title: str) -> Table:
    """One line a policy: last epoch's losses and top-1; the ratio is to the first run with nothing quantized."""
    baseline = next((run.step_seconds for run in runs if not run.quantized), None)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    columns = ("policy", "Ω", "train", "val.", "top-1", "ms/step", "ratio", "1st step", "sites")
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for run in runs:
        ratio = run.step_seconds / baseline if run.step_seconds and baseline else None
        table.add_row(
            run.policy,
            f"{run.complexity:g}",
            f"{run.train_loss[-1]:.3f}",
            f"{run.validation_loss[-1]:.3f}",
            f"{100 * run.top1[-1]:.1f} %",
            "-" if run.step_seconds is None else f"{1000 * run.step_seconds:.1f}",
            "-" if ratio is None else f"{ratio:.2f}×",
            "-" if run.first_step_seconds is None else f"{run.first_step_seconds:.1f} s",
            f"{run.quantized}/{run.sites}",
        )
    return table


def plot(runs: Sequence[Run], title: str, file: Path) -> None:
    """Loss over epochs as PNG: validation solid, training dashed, one colour a policy."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    for number, run in enumerate(runs):
        epochs = range(1, len(run.train_loss) + 1)
        label = f"{run.policy} ({100 * run.top1[-1]:.1f} %)"
        axes.plot(epochs, run.validation_loss, color=f"C{number}", marker=".", label=label)
        axes.plot(epochs, run.train_loss, color=f"C{number}", linestyle="--", linewidth=0.9, alpha=0.7)
    axes.set(xlabel="epoch", ylabel="cross-entropy (log scale)", yscale="log", title=title)
    axes.legend(title="validation, solid (top-1);\ntraining, augmented, dashed")
    axes.grid(alpha=0.3, which="both")
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
