"""Runs the cases of a file on two processes over gloo, and says what became of each.

A file of cases is a module of functions called ``case_...``, each run on both ranks; what one raises on either is its
outcome. ``python -m torch.distributed.run ... two_processes.py FILE FOLDER [CASE ...]`` runs all or some.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

HERE = Path(__file__).parent
TIMEOUT = 240


def cases(module: ModuleType) -> dict[str, Callable[[], None]]:
    """The cases of a module, by name."""
    return {name.removeprefix("case_"): f for name, f in vars(module).items() if name.startswith("case_")}


def launch(file: str, folder: Path) -> dict[str, str]:
    """What each case of ``file`` raised, on which rank; "" for nothing."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(HERE / "two_processes.py"), file, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )
    print(run.stdout)
    outcomes: dict[str, str] = {}
    for rank in range(2):
        report = folder / f"rank{rank}.json"
        if not report.exists():
            raise AssertionError(f"rank {rank} did not come to an end:\n{run.stdout[-2000:]}\n{run.stderr[-6000:]}")
        for name, raised in json.loads(report.read_text()).items():
            outcomes[name] = outcomes.get(name, "") + (f"on rank {rank}:\n{raised}" if raised else "")
    return outcomes


def main(file: str, folder: Path, *only: str) -> None:
    """One rank: every case in turn. A case that fails on one rank would leave the other waiting: its end is agreed."""
    warnings.simplefilter("ignore")  # torch's own, on views and on random numbers of DTensors
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    module = importlib.import_module(file)
    module.FOLDER = folder  # type: ignore[attr-defined]
    outcomes = {}
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
        (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(outcomes))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
