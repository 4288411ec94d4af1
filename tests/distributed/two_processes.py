"""Runs the cases of a file on two processes over gloo, and reports the outcome of each case.

A file of cases is a module of functions ``case_...``. Each runs on both ranks; an error on either rank is its outcome.
``run_ranks(python("two_processes.py", FILE, FOLDER, *CASES), FOLDER)`` runs all or some.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes import PARTNER, python, rendezvous, run_ranks, write_whole

HERE = Path(__file__).parent


def _module(file: str) -> ModuleType:
    return importlib.import_module(f"tests.distributed.{file}")


def each(*arguments: tuple[object, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a function that is a case with each tuple of ``arguments``."""

    def mark(case: Callable[..., None]) -> Callable[..., None]:
        case.arguments = arguments  # type: ignore[attr-defined]
        return case

    return mark


def cases(module: ModuleType) -> dict[str, Callable[[], None]]:
    """Return the cases of a file, by function and arguments."""
    found: dict[str, Callable[[], None]] = {}
    for function in [f for name, f in vars(module).items() if name.startswith("case_")]:
        for arguments in getattr(function, "arguments", [()]):
            name = "-".join(map(str, (function.__name__.removeprefix("case_"), *arguments)))
            found[name] = partial(function, *arguments)
    return found


def launch(file: str, folder: Path, *only: str) -> dict[str, str]:
    """Return what each case of ``file``, or each of ``only``, raised on which rank; "" if it raised nothing.

    If a rank ended before the end of a case, the outcome is how the rank ended, with its output.
    """
    failures = run_ranks(python(HERE / "two_processes.py", file, folder, *only), folder)
    print((folder / "rank0.log").read_text(errors="replace"))
    outcomes = dict.fromkeys(only or cases(_module(file)), "")
    for rank, failure in enumerate(failures):
        report = folder / f"rank{rank}.json"
        reported: dict[str, str] = json.loads(report.read_text()) if report.exists() else {}
        for name in outcomes:
            raised = reported.get(name, f"no outcome: {failure or 'the rank ended before this case'}")
            outcomes[name] += f"on rank {rank}:\n{raised}\n" if raised else ""
    return outcomes


def main(file: str, folder: Path, *only: str) -> None:
    """Run every case in turn on this rank; ranks wait for each other after each case, whether or not it failed."""
    warnings.simplefilter("ignore")  # torch warns about views and random numbers of DTensors
    dist.init_process_group("gloo", timeout=timedelta(seconds=PARTNER), **rendezvous(folder))  # type: ignore[arg-type]
    module = _module(file)
    module.FOLDER = folder  # type: ignore[attr-defined]
    outcomes = {}
    gc.freeze()  # as tests/conftest.py does
    for name, case in cases(module).items():
        if only and name not in only:
            continue
        begin = time.perf_counter()
        torch._dynamo.reset()
        torch.manual_seed(0)
        try:
            case()
            outcomes[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  # any failure is the outcome
            outcomes[name] = traceback.format_exc(limit=-6)
        if dist.get_rank() == 0:
            print(f"{time.perf_counter() - begin:6.1f} s {name}", flush=True)
        write_whole(folder / f"rank{dist.get_rank()}.json", json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
