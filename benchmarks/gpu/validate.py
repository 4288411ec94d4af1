"""Validates the GPU code on a machine with a GPU, part by part: ``make gpu-validate``.

    python -m benchmarks.gpu.validate --part kernels
    python -m benchmarks.gpu.validate                  # every part, within the time limit
    python -m benchmarks.gpu.validate --rehearse       # on the CPU, at a small size

Parts: ``kernels``, every operator beside tensor code, bit by bit; ``quantizers``, every quantizer with its techniques
as Inductor compiles it, beside eager mode, bit by bit; ``parity``, short trainings beside eager mode; ``steps``, time
and peak memory of training steps beside the unquantized model; ``switches``, the same with one switch changed.

Figures go to one JSON file and one Markdown page in ``--folder`` after every case. A command begins at least one case,
and no other that may end after ``--minutes``, and prints the number of cases that are left. The same command continues:
first with cases that were never tried, then with cases that failed or were measured at another commit or with other
versions. ``--again`` measures all cases again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import util
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.gpu.run import Case, Outcome, one_by_one, prepared_together, side_by_side
from benchmarks.processes import ROOT, Figures

#: Required modules, with the name of the package if that differs.
NEEDED = dict.fromkeys(("torch", "triton", "pydantic", "yaml", "pluggy", "rich", "numpy", "timm", "transformers"), "")
NEEDED |= {"yaml": "pyyaml", "fp4graph_policies": "fp4graph"}
PARTS = ("kernels", "quantizers", "parity", "steps", "switches")
#: Of the figures, and of those of a rehearsal, which git ignores.
FOLDERS = (ROOT / "benchmarks" / "results", ROOT / "runs" / "gpu_validate")


def cases(parts: list[str], device: Any, backend: str, rehearse: bool, seconds: float) -> Iterator[Case]:
    """Yield the cases of ``parts``, the most informative first."""
    from benchmarks.gpu import checks, steps
    from tests.gpu.cases import quantizers

    few = 1 if rehearse else None  # of everything
    dtypes = ("bfloat16", "float32")[:few]
    if "kernels" in parts:
        specs = list(checks.kernel_specs().items())[:few]
        for (name, spec), dtype in product(specs, dtypes if rehearse else checks.DTYPES):
            run = partial(checks.kernels, spec, checks.DTYPES[dtype], device)
            yield Case("kernels", {"spec": name, "dtype": dtype}, run)
    if "quantizers" in parts:
        named = [name for name in quantizers() if not rehearse or name.startswith("microscaling:fprop.input")]
        for name, dtype in product(named, dtypes):
            run = partial(checks.quantizer, name, checks.DTYPES[dtype], device)
            yield Case("quantizers", {"quantizer": name, "dtype": dtype}, run)
    if "parity" in parts:
        models = ("trial-vit", "trial-llama", "deit-tiny")[:few]
        for model, policy, dtype in product(models, steps.POLICIES[:few], dtypes):
            run = partial(checks.parity, model, policy, checks.DTYPES[dtype], device, backend)
            yield Case("parity", {"model": model, "policy": policy, "dtype": dtype}, run)
    models = ("trial-stack",) if rehearse else ("deit-base", "llama-350m", "deit-small")
    first, *others = steps.SWITCHES
    for part, switches in (("steps", [first]), ("switches", others[:few])):
        for dtype, model, name in product(dtypes, models, switches if part in parts else ()):
            switch = steps.SWITCHES[name]
            for policy in switch.policies[:few] if dtype in switch.dtypes else ():
                run = partial(steps.step, model, policy, dtype, name, device, backend, seconds)
                yield Case(part, {"model": model, "policy": policy, "dtype": dtype, "switch": name}, run)


def parser() -> argparse.ArgumentParser:
    cli = argparse.ArgumentParser(
        "benchmarks.gpu.validate", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    cli.add_argument("--part", action="append", choices=PARTS, help="one part; repeat it for more (every part)")
    cli.add_argument("--device", default=None, help="cuda, cuda:1 (cuda; cpu with --rehearse)")
    cli.add_argument("--rehearse", action="store_true", help="on the CPU, few cases, small models")
    cli.add_argument("--backend", default="inductor", help="eager tries a rehearsal without compiling")
    cli.add_argument("--minutes", type=float, default=7.0, help="begin no case that may end later than this (7)")
    cli.add_argument("--seconds", type=float, help="time limit of one timing (10; 0.5 with --rehearse)")
    jobs = "processes that compile at a time (1); timings stay alone"
    cli.add_argument("--jobs", type=int, default=1, choices=range(1, 257), metavar="1-256", help=jobs)
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

    from benchmarks.gpu.record import Record

    device = torch.device(options.device or ("cpu" if options.rehearse else "cuda"))
    began, record = time.perf_counter(), Record(options.folder or FOLDERS[options.rehearse], device)
    seconds = options.seconds if options.seconds is not None else 0.5 if options.rehearse else 10.0
    all_cases = cases(options.part or list(PARTS), device, options.backend, options.rehearse, seconds)
    remaining = sorted((case for case in all_cases if options.again or record.failure(case)), key=record.tried)
    begun, failed, answers = 0, 0, True

    def begin(chosen: Iterable[Case]) -> Iterator[Case]:
        nonlocal begun
        for case in chosen:
            if not answers:
                return  # cases that other processes run end, and are recorded
            if not begun or time.perf_counter() - began + record.longest(case.part) <= 60 * options.minutes:
                begun += 1
                record.begin(case)
                yield case

    for case, figures, works in _outcomes(remaining, begin, device, options.jobs):
        record.add(case, figures)
        reason = record.failure(case)
        failed += reason is not None
        print(f"{' '.join(case.name.values())}: {'FAILED, ' if reason else ''}{_short(figures)}", flush=True)
        answers &= works
    if not answers:
        print(f"{device} no longer answers this process: run the same command again")
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


def _is_there(name: str, *, rehearse: bool) -> bool:
    return (rehearse and name == "triton") or util.find_spec(name) is not None


def _lacks() -> list[str]:
    """Return the requirements besides packages that this machine does not meet, a line each."""
    import torch

    lines = []
    if not torch.cuda.is_available():
        lines.append("torch sees no CUDA device on this machine; --rehearse runs on the CPU")
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]  # as Triton chooses
    if not any(map(shutil.which, compilers)):
        named = " or ".join(compilers)
        lines.append(f"no C compiler ({named}), which Triton needs: install gcc, or set CC to one's path")
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's; as Triton does
    headers = Path(sysconfig.get_path("include", scheme))
    if not (headers / "Python.h").exists():
        lines.append(f"no Python.h in {headers}, which Triton needs: install python3-dev or python3-devel")
    return lines


def _short(figures: Figures) -> str:
    shown = {key: value for key, value in figures.items() if not isinstance(value, list)}
    return ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown.items())


if __name__ == "__main__":
    sys.exit(main())
