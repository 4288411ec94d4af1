"""Keeps the results of trainings in a file of JSON lines, so that a restarted script only trains the missing runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import track

from fp4graph.lab import jsonlines
from fp4graph.lab.runs.run import finite

#: The cell of trainings of which one diverged.
DIVERGED = "diverged"


def finished(file: Path, runs: list[dict[str, Any]], train: Callable[..., Any]) -> dict[tuple[Any, ...], Any]:
    """Return each run with its results, by the run's values; call ``train`` for the runs that ``file`` lacks."""
    file.parent.mkdir(parents=True, exist_ok=True)
    jsonlines.cut_torn_line(file)  # of a kill or a full disk
    results = {tuple(line[name] for name in runs[0]): line for _, line in jsonlines.read(file, *runs[0])}
    for run in track([run for run in runs if tuple(run.values()) not in results], description="training"):
        results[tuple(run.values())] = result = finite({**run, **train(**run)})
        jsonlines.append(file, [result])
    return results


def markdown(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
