"""Validates the GPU code on a machine with a GPU, part by part: ``make gpu-validate``.

    python -m benchmarks.gpu.validate --part kernels
    python -m benchmarks.gpu.validate                  # every part, within the time limit
    python -m benchmarks.gpu.validate --rehearse       # on the CPU, at a small size

Parts: ``kernels``, every operator beside tensor code, bit by bit; ``quantizers``, every quantizer with its techniques
as Inductor compiles it, beside eager mode, bit by bit; ``parity``, short trainings beside eager mode; ``steps``, time
and peak memory of training steps beside the unquantized model; ``switches``, the same with one switch changed.

Figures go to one JSON file and one Markdown page in ``--folder`` after every case. A command begins at least one case,
and no other that may end after ``--minutes``, and prints the number of cases that are left. The same command continues:
first with cases that were never tried, then with cases that failed or were measured at another commit. ``--again``
measures all cases again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from functools import partial
from importlib import metadata, util
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import Case, Figures, Outcome, one_by_one, prepared_together, side_by_side

#: Required modules, with the name of the package if that differs.
NEEDED = dict.fromkeys(("torch", "triton", "pydantic", "yaml", "pluggy", "rich", "numpy", "timm", "transformers"), "")
NEEDED |= {"yaml": "pyyaml", "fp4graph_policies": "fp4graph"}
PARTS = ("kernels", "quantizers", "parity", "steps", "switches")
ROOT = Path(__file__).parents[2]
POLICIES = ("tetrajet", "tetrajet-qema", "microscaling", "nvfp4", "fp4-all-the-way")


def cases(parts: list[str], device: Any, backend: str, rehearse: bool, seconds: float) -> Iterator[Case]:
    """Yield the cases of ``parts``, the most informative first."""
    from benchmarks.gpu import checks, steps
    from tests.gpu import cases as cases_of_tests

    dtypes = ("bfloat16",) if rehearse else ("bfloat16", "float32")
    if "kernels" in parts:
        specs = checks.kernel_specs()
        chosen = dict(list(specs.items())[:1]) if rehearse else specs
        for (name, spec), dtype in product(chosen.items(), dtypes if rehearse else checks.DTYPES):
            yield Case(
                "kernels",
                {"spec": name, "dtype": dtype},
                partial(checks.kernels, spec, checks.DTYPES[dtype], device),
            )
    if "quantizers" in parts:
        named = [
            name for name in cases_of_tests.quantizers() if not rehearse or name.startswith("microscaling:fprop.input")
        ]
        for name, dtype in product(named, dtypes):
            run = partial(checks.quantizer, name, checks.DTYPES[dtype], device)
            yield Case("quantizers", {"quantizer": name, "dtype": dtype}, run)
    if "parity" in parts:
        models = ("trial-vit",) if rehearse else ("trial-vit", "trial-llama", "deit-tiny")
        for model, policy, dtype in product(models, POLICIES[:1] if rehearse else POLICIES, dtypes):
            run = partial(checks.parity, model, policy, checks.DTYPES[dtype], device, backend)
            yield Case("parity", {"model": model, "policy": policy, "dtype": dtype}, run)
    models = ("trial-stack",) if rehearse else ("deit-base", "llama-350m", "deit-small")
    if "steps" in parts:
        for dtype, model, policy in product(dtypes, models, POLICIES[:1] if rehearse else POLICIES):
            run = partial(steps.step, model, policy, dtype, "default", device, backend, seconds)
            yield Case("steps", {"model": model, "policy": policy, "dtype": dtype, "switch": "default"}, run)
    if "switches" in parts:
        others = [name for name in steps.SWITCHES if name != "default"]
        for dtype, model, switch in product(dtypes, models, others[:1] if rehearse else others):
            if switch == steps.FP32_PRODUCTS and dtype != "float32":
                continue  # products are bf16 by default
            scaled = switch == steps.LIBRARY_PRODUCTS
            if scaled and dtype == "float32":
                continue  # a library computes these products under both settings
            for policy in (
                POLICIES[:1] if rehearse else ("fp4-all-the-way",) if scaled else ("tetrajet", "microscaling")
            ):
                run = partial(steps.step, model, policy, dtype, switch, device, backend, seconds)
                yield Case("switches", {"model": model, "policy": policy, "dtype": dtype, "switch": switch}, run)


class Record:
    """The JSON file and the page of one device; a case measured again replaces its earlier row."""

    def __init__(self, folder: Path, device: Any) -> None:
        self.machine = _machine(device)
        name = f"gpu_validate.{re.sub('[^a-z0-9]+', '-', self.machine['device'].lower()).strip('-')}"
        self.file, self.page = folder / f"{name}.json", folder / f"{name}.md"
        stored = json.loads(self.file.read_text("utf-8")) if self.file.exists() else {"rows": []}
        self.rows: list[dict[str, Any]] = stored["rows"]
        self._commit = _commit()

    def failure(self, case: Case) -> str | None:
        """Return why the case is not done, or None if it succeeded at this commit."""
        from benchmarks.gpu.page import failure

        row = self._row(case)
        if row is None:
            return "never tried"
        return failure(row) if row["commit"] == self._commit else "done at another commit"

    def tried(self, case: Case) -> str:
        """Return when the case was last tried, as text that sorts by time; "" if never, which sorts first."""
        row = self._row(case)
        return "" if row is None else row["date"]

    def longest(self, part: str) -> float:
        """Return the seconds of the longest case of ``part`` so far."""
        rows = (row for row in self.rows if row["case"]["part"] == part)
        return max((row["figures"].get("took_seconds", 0.0) for row in rows), default=0.0)

    def begin(self, case: Case) -> None:
        """Mark the case as begun; the mark stays if the process is killed."""
        self.add(case, {"failed": "begun and not ended: it runs, or was killed"})

    def add(self, case: Case, figures: Figures) -> None:
        """Add the figures of a case to both files."""
        from benchmarks.gpu.page import markdown

        self.rows = [row for row in self.rows if row["case"] != case.name]
        self.rows.append({"case": case.name, "commit": self._commit, "date": _now(), "figures": figures})
        content = {"benchmark": "gpu_validate", "machine": self.machine, "rows": self.rows}
        _write(self.file, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        _write(self.page, markdown(content, predictions(ROOT / "benchmarks" / "results")))

    def _row(self, case: Case) -> dict[str, Any] | None:
        return next((row for row in self.rows if row["case"] == case.name), None)


def predictions(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of ``make gpu-plan`` in ``folder`` that have an estimate."""
    files = sorted(folder.glob("gpu_plan.*.json"))
    rows = [row for file in files for row in json.loads(file.read_text("utf-8"))["rows"]]
    return [row for row in rows if "estimate" in row["figures"]]


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser("benchmarks.gpu.validate", description=__doc__, formatter_class=_Help)
    cli.add_argument("--part", action="append", choices=PARTS, help="one part; repeat it for more (every part)")
    cli.add_argument("--device", default=None, help="cuda, cuda:1 (cuda; cpu with --rehearse)")
    cli.add_argument("--rehearse", action="store_true", help="on the CPU, few cases, small models")
    cli.add_argument("--backend", default="inductor", help="eager tries a rehearsal without compiling")
    cli.add_argument("--minutes", type=float, default=7.0, help="begin no case that may end later than this (7)")
    cli.add_argument("--seconds", type=float, default=10.0, help="time limit of one timing (10)")
    cli.add_argument("--jobs", type=int, default=1, help="processes that compile at a time (1); timings stay alone")
    cli.add_argument("--again", action="store_true", help="measure cases that have figures too")
    cli.add_argument("--folder", type=Path, help="benchmarks/results; runs/gpu_validate with --rehearse")
    return cli


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return 0 if all is done, 1 if a case failed, 2 if a requirement is missing, 3 if cases are
    left."""
    options = parser().parse_args(arguments)
    if missing := [
        package or name for name, package in NEEDED.items() if not _is_there(name, rehearse=options.rehearse)
    ]:
        print(f"not installed: {', '.join(missing)}. Install them with pip (this package with pip install -e .)")
        return 2
    if not options.rehearse and (lacking := _lacks()):
        print("\n".join(lacking))
        return 2
    import torch

    device = torch.device(options.device or ("cpu" if options.rehearse else "cuda"))
    began, record = time.perf_counter(), Record(options.folder or _folder(options.rehearse), device)
    seconds = 0.5 if options.rehearse else options.seconds
    all_cases = cases(options.part or list(PARTS), device, options.backend, options.rehearse, seconds)
    remaining = sorted((case for case in all_cases if options.again or record.failure(case)), key=record.tried)
    begun = failed = 0

    def begin(chosen: Iterable[Case]) -> Iterator[Case]:
        nonlocal begun
        for case in chosen:
            if not begun or time.perf_counter() - began + record.longest(case.part) <= 60 * options.minutes:
                begun += 1
                record.begin(case)
                yield case

    for case, figures, works in _outcomes(remaining, begin, device, options.jobs):
        record.add(case, figures)
        reason = record.failure(case)
        failed += reason is not None
        print(f"{' '.join(case.name.values())}: {'FAILED, ' if reason else ''}{_short(figures)}", flush=True)
        if not works:
            print(f"{device} no longer answers this process: run the same command again")
            break
    print(f"{record.file}\n{record.page}")
    if begun < len(remaining):
        print(f"{len(remaining) - begun} cases are left: run the same command again")
    return 1 if failed else 3 if begun < len(remaining) else 0


def _outcomes(
    remaining: list[Case], begin: Callable[[Iterable[Case]], Iterator[Case]], device: Any, jobs: int
) -> Iterator[Outcome]:
    """Yield the outcome of every case that ``begin`` lets begin: first the checks, then the timings."""
    if jobs == 1:
        yield from one_by_one(begin(remaining), device)
        return
    yield from side_by_side(begin(case for case in remaining if not case.timed), device, jobs)
    yield from prepared_together(begin(case for case in remaining if case.timed), jobs)


class _Help(argparse.RawDescriptionHelpFormatter):
    pass


def _is_there(name: str, *, rehearse: bool) -> bool:
    return (rehearse and name == "triton") or util.find_spec(name) is not None


def _lacks() -> list[str]:
    """Return the requirements besides packages that this machine does not meet, a line each."""
    import torch

    lines = (
        [] if torch.cuda.is_available() else ["torch sees no CUDA device on this machine; --rehearse runs on the CPU"]
    )
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton chooses
    if not any(map(shutil.which, compilers)):
        lines.append(
            f"no C compiler ({' or '.join(compilers)}), which Triton needs: install gcc, or set CC to one's path"
        )
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's; as Triton does
    headers = Path(sysconfig.get_path("include", scheme))
    if not (headers / "Python.h").exists():
        lines.append(f"no Python.h in {headers}, which Triton needs: install python3-dev or python3-devel")
    return lines


def _folder(rehearse: bool) -> Path:
    """Return the folder of the figures; git ignores that of a rehearsal."""
    return ROOT / "runs" / "gpu_validate" if rehearse else ROOT / "benchmarks" / "results"


def _short(figures: Figures) -> str:
    shown = {key: value for key, value in figures.items() if not isinstance(value, list)}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())


def _machine(device: Any) -> dict[str, Any]:
    """Return the properties of the machine on which the figures depend."""
    import torch

    on_gpu = device.type == "cuda"
    versions: dict[str, str | None] = {}
    for package in ("torch", "triton", "timm", "transformers"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    machine: dict[str, Any] = {
        "device": f"{platform.machine()} {torch.get_num_threads()} threads",
        "python": platform.python_version(),
    }
    if on_gpu:
        properties = torch.cuda.get_device_properties(device)
        machine["device"] = properties.name
        machine["capability"] = f"{properties.major}.{properties.minor}"
        machine["memory_gib"] = round(properties.total_memory / 2**30, 1)
    environment = {
        name: value for name, value in os.environ.items() if name.startswith(("FP4GRAPH_", "TORCHINDUCTOR_"))
    }
    return {**machine, "cuda": torch.version.cuda, "versions": versions, "environment": environment}


def _commit() -> str | None:
    try:
        result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return result.stdout.strip()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _write(file: Path, text: str) -> None:
    """Write a temporary file and rename it, so that a kill leaves the earlier file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    beside.write_text(text, "utf-8")
    beside.replace(file)


if __name__ == "__main__":
    sys.exit(main())
