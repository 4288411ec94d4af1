"""Where figures go: a file for each benchmark and machine, whose rows say when and from which commit they are.

    {"benchmark": ..., "machine": {...},
     "runs": {"1": {"date", "commit", "dirty", "versions", "settings", ...}, ...},
     "rows": [{"run": "1", "case": {...}, "figures": {...}}, ...]}

A row measured again takes the place of the former one of the same case; the others, and their runs, stay.
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
#: Environment variables that change what is measured.
VARIABLES = ("FP4GRAPH_", "OMP_", "MKL_", "KMP_")
GIB = 2**30


@dataclass(frozen=True)
class Row:
    """One measurement: ``case`` says of what, in plain values, ``figures`` what came out."""

    case: Mapping[str, Any]
    figures: Mapping[str, Any]


class Inapplicable(Exception):
    """What was asked for does not exist: a library that is not installed, a policy that fits no single linear."""


def attempt(case: Mapping[str, Any], measure: Callable[[], Mapping[str, Any]]) -> Row:
    """The row of ``case`` with the figures that ``measure`` returns, or with the reason why there are none.

    One failure, which may be a compiler's, does not end a run of hours.
    """
    try:
        return Row(case, measure())
    except Inapplicable as error:
        return Row(case, {"inapplicable": str(error).replace(f"{ROOT}{os.sep}", "")})
    except Exception as error:  # noqa: BLE001
        traceback.print_exc()
        return Row(case, {"failed": f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"})


def figures_of(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain data, every repeat included. Seconds."""
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
    """What the figures depend on and no commit can change."""
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
    """A name for files: of the GPU if there is one, else of the processor and the number of threads."""
    name = machine["gpu"] or f"{machine['cpu']} {machine['threads']} threads"
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


def file_of(benchmark: str, machine: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Where the rows of a benchmark on a machine are."""
    return folder / f"{benchmark}.{slug(machine)}.json"


class Results:
    """The rows of one run of a benchmark, written to its file as they come: a long run that is stopped keeps them.

    Args:
        benchmark: its name. context: of its command line, whose options are recorded. folder: of the file.
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
        """Keep a row, in the file too."""
        self.rows.append(row)
        self._write()

    def known(self, case: Mapping[str, Any]) -> dict[str, Any] | None:
        """The figures that the file has of a case already; None also where it has a failure."""
        rows = load(self.file)["rows"] if self.file.exists() else []
        found: list[dict[str, Any]] = [row["figures"] for row in rows if row["case"] == dict(case)]
        return found[0] if found and "failed" not in found[0] else None

    def close(self, title: str, columns: Sequence[Column]) -> None:
        """Print the rows and where they are; a failed one makes the command fail."""
        show(title, columns, [{"case": row.case, "figures": row.figures} for row in self.rows])
        print(f"all repeats, machine and versions: {self.file}")
        if any("failed" in row.figures for row in self.rows):
            raise typer.Exit(1)

    def _write(self) -> None:
        stored = load(self.file) if self.file.exists() else {"runs": {}, "rows": []}
        measured = [dict(own.case) for own in self.rows]
        former = [old for old in stored["rows"] if old["case"] not in measured]
        used = {old["run"] for old in former}
        runs = {number: run for number, run in stored["runs"].items() if number in used}
        own_number = str(1 + max(map(int, runs), default=0))
        rows = former + [{"run": own_number, "case": dict(r.case), "figures": dict(r.figures)} for r in self.rows]
        write(
            self.file,
            {
                "benchmark": self.benchmark,
                "machine": self.machine,
                "runs": {**runs, own_number: self._run},
                "rows": rows,
            },
        )


def load(file: Path) -> dict[str, Any]:
    """The content of a file of results."""
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def write(file: Path, content: Mapping[str, Any]) -> None:
    """One line for a row, so that a commit shows which ones changed."""
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["rows"])
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1, ensure_ascii=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n'.encode())


@cache
def _cpu() -> dict[str, Any]:
    found: dict[str, Any] = cpuinfo.get_cpu_info()
    return found


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def _compiler() -> str | None:
    """The first line that the C++ compiler says of its version, which compile times depend on."""
    try:
        command = [*shlex.split(os.environ.get("CXX", "g++")), "--version"]
        said = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.partition("\n")[0]


def _commit() -> dict[str, Any]:
    """HEAD, and whether anything but results differs from it; None outside a clone."""
    try:
        commit = _git("rev-parse", "HEAD")
        # The figures are written while they are measured, and the document after them.
        changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return {"commit": None, "dirty": None}
    return {"commit": commit.strip(), "dirty": bool(changed.strip())}


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout
