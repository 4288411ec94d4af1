"""Files of figures: one for each benchmark and machine. Each row names its run, and so its date and commit.

    {"benchmark": ..., "machine": {...},
     "runs": {"1": {"date", "commit", "dirty", "versions", "settings", ...}, ...},
     "rows": [{"run": "1", "case": {...}, "figures": {...}}, ...]}

A row measured again replaces the earlier row of the same case; the other rows, and their runs, stay.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import cpuinfo
import psutil
import torch
import typer

from benchmarks.tables import Column, show
from benchmarks.timing import Comparison
from fp4graph.files import replacing
from fp4graph.kernels import cpu

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("fp4graph", "torch", "triton", "torchao", "brevitas", "timm", "transformers")
#: Prefixes of environment variables that change the figures.
VARIABLES = ("FP4GRAPH_", "OMP_", "MKL_", "KMP_")
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One measurement: ``case`` describes in plain values what was measured, ``figures`` are the results."""

    case: Mapping[str, Any]
    figures: Mapping[str, Any]


class Inapplicable(Exception):
    """A case cannot be measured: its library is not installed, or its policy fits no single linear."""


def attempt(case: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Row:
    """Return the row of ``case`` with the figures of ``measure``, or with the reason why there are none.

    An error of one case, such as a compiler's, must not end a run of hours.
    """
    try:
        return Row(case, measure())
    except Inapplicable as error:
        return Row(case, {"inapplicable": str(error).replace(f"{ROOT}{os.sep}", "")})
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return Row(case, {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})


def figures_of(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as plain data, in seconds, with every repeat."""
    low, middle, high = comparison.quartiles
    return {
        "ratio": middle,
        "quartiles": [low, high],
        "repeats": len(comparison.pairs),
        "settled": comparison.settled,
        "baseline_seconds": comparison.baseline,
        "seconds": comparison.seconds,
        "pairs": [list(pair) for pair in comparison.pairs],
    }


def machine(device: torch.device) -> dict[str, Any]:
    """Return the properties of the machine on which the figures depend."""
    with_gpu = device.type == "cuda"
    return {
        "cpu": _cpu().get("brand_raw") or platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": [torch.backends.cpu.get_cpu_capability(), *(f for f in _cpu().get("flags", ()) if "bf16" in f)],
        "ram_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpu": torch.cuda.get_device_name(device) if with_gpu else None,
        "gpu_ram_gib": round(torch.cuda.get_device_properties(device).total_memory / GIB, 1) if with_gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def slug(machine: Mapping[str, Any]) -> str:
    """Return a file name made from the GPU's name, or else from the processor's and the number of threads."""
    name = machine["gpu"] or f"{machine['cpu']} {machine['threads']} threads"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


def file_of(benchmark: str, machine: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    return folder / f"{benchmark}.{slug(machine)}.json"


class Results:
    """The rows of one run of a benchmark, each written to the file at once: a long run that is stopped keeps them.

    Args:
        benchmark: its name.
        context: of its command line, whose options are recorded.
        folder: the folder of the file.
    """

    def __init__(self, benchmark: str, context: typer.Context, device: torch.device, folder: Path) -> None:
        self.benchmark, self.machine, self.rows = benchmark, machine(device), list[Row]()
        self.file = file_of(benchmark, self.machine, folder)
        self._run = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            **_commit(),
            "versions": _versions(),
            "settings": {name: value for name, value in context.params.items() if name != "folder"},
            "load_average": os.getloadavg()[0],
            "cpu_kernels": cpu.available(),
            "compiler": _compiler(),
            "environment": {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)},
        }

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._write()

    def known(self, case: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the figures of a case that the file already has; None if it has none or a failure."""
        rows = load(self.file)["rows"] if self.file.exists() else []
        figures: list[dict[str, Any]] = [row["figures"] for row in rows if row["case"] == dict(case)]
        return figures[0] if figures and "failed" not in figures[0] else None

    def close(self, title: str, columns: Sequence[Column]) -> None:
        """Print the rows and the file's path; exit with status 1 if a row failed."""
        show(title, columns, [{"case": row.case, "figures": row.figures} for row in self.rows])
        print(f"all repeats, machine and versions: {self.file}")
        if any("failed" in row.figures for row in self.rows):
            raise typer.Exit(1)

    def _write(self) -> None:
        stored = load(self.file) if self.file.exists() else {"runs": {}, "rows": []}
        measured = [dict(row.case) for row in self.rows]
        kept = [row for row in stored["rows"] if row["case"] not in measured]
        used = {row["run"] for row in kept}
        runs = {number: run for number, run in stored["runs"].items() if number in used}
        number = str(1 + max(map(int, runs), default=0))
        rows = kept + [{"run": number, "case": dict(r.case), "figures": dict(r.figures)} for r in self.rows]
        write(
            self.file,
            {
                "benchmark": self.benchmark,
                "machine": self.machine,
                "runs": {**runs, number: self._run},
                "rows": rows,
            },
        )


def load(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file with one line for each row, so that the diff of a commit shows the changed rows."""
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["rows"])
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1, ensure_ascii=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'.encode())


@cache
def _cpu() -> dict[str, Any]:
    info: dict[str, Any] = cpuinfo.get_cpu_info()
    return info


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _compiler() -> str | None:
    """Return the first line of the C++ compiler's version, on which compile times depend."""
    try:
        command = [*shlex.split(os.environ.get("CXX", "g++")), "--version"]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.partition("\n")[0]


def _commit() -> dict[str, Any]:
    """Return HEAD, and whether files other than results differ from it; None outside a clone."""
    try:
        commit = _git("rev-parse", "HEAD")
        # A run writes results, and afterwards the document.
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit.strip(), "dirty": bool(changed.strip())}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
