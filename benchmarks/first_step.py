"""Time to the first step: from an existing model, optimizer and batch to the end of the first training step.

Every figure is from a separate process with a cache directory for Inductor: empty for ``cold``, and that of the cold
process for ``warm``. The policy's processes alternate with those of the unquantized, compiled model. Imports are not
counted, not even those of torch's compiler.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
from torch._dynamo.utils import counters

import fp4graph
from benchmarks import command, tables
from benchmarks.command import Cases, Settings
from benchmarks.models import DTYPES, MODELS, UNQUANTIZED, Training
from benchmarks.processes import attempt, process
from benchmarks.timing import Comparison, Patience, synchronize
from fp4graph.technique.registry import default_registry

COLUMNS = (
    *tables.cases("model", "batch", "dtype", "policy", "cache"),
    *tables.RATIO,
    tables.figure("seconds", "s"),
    tables.figure("baseline_seconds", "unquantized, s"),
    tables.Column("cache hits", lambda row: f"{row['figures']['process']['hits']}"),
)
#: Starts a process for a policy, or UNQUANTIZED, with a cache directory; returns the process's result.
Run = Callable[[str, str], dict[str, Any]]


def first_step(model: str, batch: int, dtype: str, device: torch.device, backend: str, policy: str) -> dict[str, Any]:
    """Return the seconds and the loss of a first step, and the hits in the caches of compiled graphs."""
    default_registry()  # imports the plugins
    _ = fp4graph.apply, fp4graph.prepare_optimizer  # imports the modules of both
    training = Training(MODELS[model], policy, batch, DTYPES[dtype], device, backend)
    synchronize(device)
    begin = time.perf_counter()
    training.compile()
    loss = training.step()
    synchronize(device)
    seconds = time.perf_counter() - begin
    counts = {**counters["inductor"], **counters["aot_autograd"]}
    hits = sum(count for name, count in counts.items() if name.endswith("cache_hit"))
    return {"seconds": seconds, "loss": loss.item(), "hits": hits}


def run(
    model: str, batch: int, dtype: str, device: torch.device, backend: str, policy: str, folder: str
) -> dict[str, Any]:
    """Run :func:`first_step` in a new process, with its caches in ``folder``."""
    with process(TORCHINDUCTOR_CACHE_DIR=folder, TRITON_CACHE_DIR=os.path.join(folder, "triton")) as pool:
        return pool.submit(first_step, model, batch, dtype, device, backend, policy).result()


def measure(start: Run, policy: str, patience: Patience) -> dict[str, dict[str, Any]]:
    """Return the figures of the cold and of the warm start."""
    end = time.perf_counter() + patience.seconds
    pairs: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    while True:
        result = {}
        with tempfile.TemporaryDirectory() as baseline_cache, tempfile.TemporaryDirectory() as policy_cache:
            for kind in pairs:
                baseline, result[kind] = start(UNQUANTIZED, baseline_cache), start(policy, policy_cache)
                pairs[kind].append((baseline["seconds"], result[kind]["seconds"]))
        compared = {kind: Comparison(tuple(measured), patience) for kind, measured in pairs.items()}
        if (
            all(comparison.settled for comparison in compared.values())
            or len(pairs["cold"]) >= patience.most
            or time.perf_counter() > end
        ):
            return {kind: {**compared[kind].figures, "process": result[kind]} for kind in pairs}


def cases(
    settings: Settings,
    models: command.Models = "deit-tiny",
    policies: command.Policies = "tetrajet",
    dtypes: command.Dtypes = "float32",
    batch: command.Batch = None,
) -> Cases:
    device, backend = settings.device, settings.backend
    patience = replace(settings.patience, most=max(settings.patience.least, 11))
    with tempfile.TemporaryDirectory() as folder:  # reads compiler and libraries into memory, for all starts alike
        run("trial-vit", 4, "float32", device, backend, UNQUANTIZED, folder)
    for model, size, dtype in command.trainings(models, dtypes, batch):
        for policy in command.policies_of(policies):
            start = partial(run, model, size, dtype, device, backend)
            both = cache(partial(attempt, partial(measure, start, policy, patience)))
            for kind in ("cold", "warm"):
                case = {"model": model, "batch": size, "dtype": dtype, "policy": policy, "backend": backend}
                yield {**case, "cache": kind}, partial(_of, kind, both)


def _of(kind: str, both: Callable[[], Any]) -> Any:
    """Return the figures of a kind of start, or the reason why there are none."""
    return both().get(kind, both())


benchmark = command.Benchmark(
    "first_step",
    "Time to the first step, to that of the unquantized compiled model",
    COLUMNS,
    cases,
    seconds=420,
    repeats=3,
)
app = benchmark.app

if __name__ == "__main__":
    app()
