"""Keeps the results of trainings in a file of JSON lines, so that a restarted script only trains the missing runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import track


def finished(file: Path, runs: list[dict[str, Any]], train: Callable[..., Any]) -> dict[tuple[Any, ...], Any]:
    """Return each run with its results, by the run's values; call ``train`` for the runs that ``file`` lacks."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    results = {tuple(line[name] for name in runs[0]): line for line in lines}
    for run in track([run for run in runs if tuple(run.values()) not in results], description="training"):
        results[tuple(run.values())] = result = {**run, **train(**run)}
        with file.open("a") as out:
            out.write(json.dumps(result) + "\n")
    return results


def markdown(heads: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows))
