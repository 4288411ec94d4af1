"""Files of figures: one for each benchmark and machine. Each row names its run, and so its date and commit.

    {"benchmark": ..., "machine": {...},
     "runs": {"1": {"date", "commit", "dirty", "versions", "settings", ...}, ...},
     "rows": [{"run": "1", "case": {...}, "figures": {...}}, ...]}

A row measured again replaces the earlier row of the same case; the other rows, and their runs, stay. A case that cannot
be measured here, such as that of a library that is not installed, leaves its earlier figures.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import ROOT, Figures
from benchmarks.tables import reason
from fp4graph.files import replacing
from fp4graph.kernels import cpu

RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("fp4graph", "torch", "triton", "torchao", "brevitas", "timm", "transformers")
#: Prefixes of environment variables that change the figures.
VARIABLES = ("FP4GRAPH_", "OMP_", "MKL_", "KMP_")
GIB = 2**30


@cache
def machine(device: torch.device) -> dict[str, Any]:
    """Return the properties of the machine on which the figures depend."""
    import cpuinfo  # this and psutil are absent where only cards are validated
    import psutil

    processor, with_gpu = cpuinfo.get_cpu_info(), device.type == "cuda"
    bf16 = [flag for flag in processor.get("flags", ()) if "bf16" in flag]
    return {
        "cpu": processor.get("brand_raw") or platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": [torch.backends.cpu.get_cpu_capability(), *bf16],
        "ram_gib": round(psutil.virtual_memory().total / GIB, 1),
        "gpu": torch.cuda.get_device_name(device) if with_gpu else None,
        "gpu_ram_gib": round(torch.cuda.get_device_properties(device).total_memory / GIB, 1) if with_gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def slug(name: str) -> str:
    """Return ``name`` as a part of a file name."""
    return re.sub(r"[^a-z0-9]+", "-", re.sub(r"\((r|tm)\)", "", name.lower())).strip("-")


def file_of(benchmark: str, machine: Mapping[str, Any], folder: Path = RESULTS) -> Path:
    """Return the file for the GPU's name, or else for the processor's and the number of threads."""
    name = machine["gpu"] or f"{machine['cpu']} {machine['threads']} threads"
    return folder / f"{benchmark}.{slug(name)}.json"


class Results:
    """The rows of one run of a benchmark, each written to the file at once: a long run that is stopped keeps them.

    Args:
        benchmark: its name.
        settings: the options of its command line, which are recorded.
        folder: the folder of the file.
    """

    def __init__(self, benchmark: str, settings: Mapping[str, Any], device: torch.device, folder: Path) -> None:
        self.benchmark, self.machine, self.rows = benchmark, machine(device), list[dict[str, Any]]()
        self.file = file_of(benchmark, self.machine, folder)
        self._run = {
            "date": now(),
            **commit(),
            "versions": {"python": platform.python_version(), "cuda": torch.version.cuda, **versions(PACKAGES)},
            "settings": {name: value for name, value in settings.items() if name != "folder"},
            "load_average": os.getloadavg()[0],
            "cpu_kernels": cpu.available(),
            "compiler": _compiler(),
            "environment": environment(VARIABLES),
        }

    def add(self, case: Mapping[str, Any], figures: Figures) -> None:
        """Add a row: ``case`` describes in plain values what was measured."""
        self.rows.append({"case": dict(case), "figures": dict(figures)})
        stored = load(self.file) if self.file.exists() else {"runs": {}, "rows": []}
        known = [row["case"] for row in stored["rows"] if reason(row) is None]
        new = [row for row in self.rows if "inapplicable" not in row["figures"] or row["case"] not in known]
        kept = [row for row in stored["rows"] if row["case"] not in [row["case"] for row in new]]
        used = {row["run"] for row in kept}
        runs = {number: run for number, run in stored["runs"].items() if number in used}
        number = str(1 + max(map(int, runs), default=0))
        content = {"benchmark": self.benchmark, "machine": self.machine, "runs": {**runs, number: self._run}}
        write(self.file, {**content, "rows": kept + [{"run": number, **row} for row in new]})


def load(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def plans(folder: Path) -> list[dict[str, Any]]:
    """Return the contents of the files of ``make gpu-plan``, without rows for rates that its options named."""
    contents, named = [load(file) for file in sorted(folder.glob("gpu_plan.*.json"))], {"bandwidth", "gemm_rate"}
    return [{**content, "rows": [r for r in content["rows"] if not named & r["case"].keys()]} for content in contents]


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Write a file with one line for each row, so that the diff of a commit shows the changed rows."""
    rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in content["rows"])
    head = json.dumps({key: value for key, value in content.items() if key != "rows"}, indent=1, ensure_ascii=False)
    write_text(file, f'{head[:-2]},\n "rows": [\n{rows}\n ]\n}}\n')


def write_text(file: Path, text: str) -> None:
    """Replace ``file``, so that a kill leaves the earlier one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as stream:
        stream.write(text.encode())


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(prefixes: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(tuple(prefixes))}


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """Return the versions of packages; None for one that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def commit() -> dict[str, Any]:
    """Return HEAD, and whether files other than results differ from it; None outside a clone."""
    head = _said("git", "rev-parse", "HEAD")
    # A run writes results, and afterwards the document.
    changed = _said("git", "status", "--porcelain", "--", ".", ":!benchmarks/results", ":!docs")
    if head is None or changed is None:
        return {"commit": None, "dirty": None}
    return {"commit": head.strip(), "dirty": bool(changed.strip())}


def _compiler() -> str | None:
    """Return the first line of the C++ compiler's version, on which compile times depend."""
    said = _said(*shlex.split(os.environ.get("CXX", "g++")), "--version")
    return None if said is None else said.partition("\n")[0]


def _said(*command: str) -> str | None:
    """Return the output of a command; None if it fails."""
    try:
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
