"""Trains one policy under one seed, and returns the run's line of ``runs.jsonl``."""

from __future__ import annotations

import gc
import math
import os
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import connection, parent_process
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from fp4graph.errors import Error
from fp4graph.files import write
from fp4graph.lab.comparison.training import Incomparable, Log, Stop, Train, call, seeded
from fp4graph.lab.linears import bits_per_weight, fp4_flops
from fp4graph.lab.statistics.collect import Statistics
from fp4graph.model import coverage
from fp4graph.model.listening import Silent, listening
from fp4graph.model.runtime import runtime_of
from fp4graph.policy import Policy

#: The most points of the curve in a run's line; each point is the mean loss of the steps since the point before.
POINTS = 200
#: The statistics that a comparison's page shows, and the statistics by which a diagnosis finds the remedy of a low SNR.
METRICS = ("snr", "error", "saturation", "underflow", "scales")
#: The file in the folder of a run that raised.
TRACEBACK = "traceback.txt"
Progress = Callable[[Policy, int, int, float], None]


def train_once(
    train: Train,
    policy: Policy,
    seed: int,
    folder: Path,
    statistics: int | None = None,
    progress: Progress = lambda policy, seed, step, loss: None,
) -> dict[str, Any]:
    """Run one training until it ends, raises, or logs a loss that is not finite; return the line of the run.

    Raises:
        Incomparable: the training neither returned nor logged a loss, or a metric has a reserved name.
    """
    watcher = _Watcher(folder / "statistics", statistics if policy.ever_quantizes else None)
    intervals: list[float] = []
    last_look: list[tuple[int, float]] = []

    def look(step: int, loss: float | None) -> None:
        now = time.perf_counter()
        intervals.extend((now - then) / (step - last) for last, then in last_look if step > last)
        last_look[:] = [(step, now)]
        watcher.look(step)
        if loss is not None:
            progress(policy, seed, step, loss)
            if not math.isfinite(loss):
                raise Stop

    log = Log(folder, look)
    (folder / TRACEBACK).unlink(missing_ok=True)  # from an earlier attempt
    error, loss, metrics = None, math.nan, dict[str, float]()
    started = time.perf_counter()
    with seeded(seed), listening(watcher):
        try:
            loss, metrics = call(train, policy, seed, log)
        except Stop:
            pass
        except Incomparable:
            raise
        except Exception as raised:  # noqa: BLE001  # any exception of the training is the result of this run
            frames = traceback.extract_tb(raised.__traceback__)
            place = [frame for frame in frames if not _of_a_library(frame.filename)] or frames
            error = f"{type(raised).__name__}: {raised} ({place[-1].filename}:{place[-1].lineno})"
            error = error.encode(errors="backslashreplace").decode()  # names of files may hold what UTF-8 lacks
            with suppress(Error, UnicodeError):  # writing the record reports a full disk
                write(folder / TRACEBACK, "".join(traceback.format_exception(raised)))
        finally:
            watcher.close()
    gc.collect()
    points = log.points if log.begun or error is None else []  # else the points are of an earlier attempt
    return {
        "kind": "run", "policy": policy.name, "fingerprint": policy.fingerprint, "seed": seed,
        "state": "failed" if error is not None else "finished" if math.isfinite(loss) else "diverged",
        "error": error,
        "step": points[-1][0] if points else 0,
        "loss": loss,
        "metrics": metrics,
        "seconds": time.perf_counter() - started,
        "ms_per_step": 1000 * median(intervals) if intervals else None,
        "model": watcher.model,
        "note": watcher.note,
        "curve": thinned(points),
    }  # fmt: skip


def _of_a_library(file: str) -> bool:
    """Return whether code belongs to Python, fp4graph or an installed package, not to the user."""
    generated = file.startswith(("<frozen", "<eval_with_key")) or "torchinductor_" in file
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    folders = sysconfig.get_path("stdlib"), Path(__file__).parents[2]
    return generated or bool(installed) or any(Path(file).is_relative_to(folder) for folder in folders)


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most :data:`POINTS` points, each the last step of a group with the mean loss of the group."""
    size = math.ceil(len(points) / POINTS) or 1
    groups = [points[place : place + size] for place in range(0, len(points), size)]
    return [(group[-1][0], fmean(loss for _, loss in group)) for group in groups]


class _Watcher(Silent):
    """Listens to a training; at its first logged step, summarizes the model and attaches statistics."""

    _model: Callable[[], nn.Module | None] = staticmethod(lambda: None)
    _optimizer: Callable[[], torch.optim.Optimizer | None] = staticmethod(lambda: None)
    _statistics: Statistics | None = None
    model: dict[str, Any] | None = None
    note: str | None = None

    def __init__(self, folder: Path, every: int | None) -> None:
        self._options: dict[str, Any] = {"every": every, "directory": folder, "metrics": METRICS}

    def applied(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    def prepared(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = weakref.ref(model), weakref.ref(optimizer)

    def look(self, step: int) -> None:
        model, optimizer = self._model(), self._optimizer()
        if self.model is not None or model is None or (runtime := runtime_of(model)) is None or not runtime.sites:
            return
        if self._options["every"] is not None and optimizer is not None:
            try:
                self._statistics = Statistics(model, optimizer, step=step, **self._options)
            except Error as error:
                self.note = f"no statistics were recorded: {error}"
        # Recompilations, generations and other modes capture a GEMM again; count it once.
        served = coverage.served_sites(runtime.root, runtime.capture)
        sites = list({(name, site.op, site.occurrence): site for site, names in served for name in names}.values())
        self.model = {
            "sites": len(sites),
            "quantized": sum(site.quantized for site in sites),
            "fp4_flops": fp4_flops(sites),
            "bits_per_weight": bits_per_weight(sites),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
        }

    def close(self) -> None:
        if self._statistics is not None:
            with suppress(Error):
                self._statistics.close()


def orphan_watch() -> None:
    """End this process when its parent ends, so that a killed comparison leaves no training behind."""
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
