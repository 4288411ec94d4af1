"""Time to the first step: from an existing model, optimizer and batch to the end of the first training step.

Every figure is from a separate process with a cache directory for Inductor: empty for ``cold``, and that of the cold
process for ``warm``. The policy's processes alternate with those of the unquantized, compiled model. Imports are not
counted, not even those of torch's compiler.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from benchmarks import options, tables
from benchmarks.models import MODELS, UNQUANTIZED
from benchmarks.results import RESULTS, ROOT, Results, Row, attempt, figures_of
from benchmarks.timing import Comparison, Patience

COLUMNS = (
    tables.case("model"),
    tables.case("batch"),
    tables.case("dtype"),
    tables.case("policy"),
    tables.case("cache"),
    *tables.RATIO,
    tables.seconds("seconds", "s"),
    tables.seconds("baseline_seconds", "unquantized, s"),
    tables.Column("cache hits", lambda row: f"{row['figures']['process']['hits']}"),
)
TITLE = "Time to the first step, to that of the unquantized compiled model"
#: Starts a process for a policy, or UNQUANTIZED, with a cache directory; returns the process's result.
Run = Callable[[str, str], dict[str, Any]]


def run(model: str, batch: int, dtype: str, device: str, backend: str, policy: str, cache: str) -> dict[str, Any]:
    """Run :mod:`benchmarks.first_step_process`; return its seconds, loss and cache hits."""
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": cache,
        "TRITON_CACHE_DIR": os.path.join(cache, "triton"),
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    command = [sys.executable, "-m", "benchmarks.first_step_process"]
    command += [model, policy, str(batch), dtype, device, backend]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.stderr.write(process.stderr)
        raise RuntimeError(f"the process of {policy} ended with {process.returncode}")
    result: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return result


def measure(start: Run, policy: str, patience: Patience) -> dict[str, dict[str, Any]]:
    """Return the figures of the cold and of the warm start."""
    end = time.perf_counter() + patience.seconds
    pairs: dict[str, list[tuple[float, float]]] = {"cold": [], "warm": []}
    while True:
        result = {}
        with tempfile.TemporaryDirectory() as baseline_cache, tempfile.TemporaryDirectory() as policy_cache:
            for cache in pairs:
                baseline, result[cache] = start(UNQUANTIZED, baseline_cache), start(policy, policy_cache)
                pairs[cache].append((baseline["seconds"], result[cache]["seconds"]))
        compared = {cache: Comparison(tuple(measured), patience) for cache, measured in pairs.items()}
        if (
            all(comparison.settled for comparison in compared.values())
            or len(pairs["cold"]) >= patience.most
            or time.perf_counter() > end
        ):
            return {cache: {**figures_of(compared[cache]), "process": result[cache]} for cache in pairs}


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    models: Annotated[str, typer.Option(help=f"Any of {', '.join(MODELS)}.")] = "deit-tiny",
    policies: options.Policies = "tetrajet",
    dtypes: options.Dtypes = "float32",
    batch: Annotated[int | None, typer.Option(min=1, help="Images or sequences. [16 images, 8 sequences]")] = None,
    device: options.Device = "cpu",
    backend: options.Backend = "inductor",
    seconds: options.Seconds = 420,
    repeats: options.Repeats = 3,
    folder: options.Folder = RESULTS,
) -> None:
    names, torch_device = options.policies_of(policies), options.device_of(device)
    patience = Patience(seconds, repeats, most=max(repeats, 11))
    results = Results("first_step", context, torch_device, folder)
    with tempfile.TemporaryDirectory() as cache:  # reads compiler and libraries into memory, for all starts alike
        run("trial-vit", 4, "float32", device, backend, UNQUANTIZED, cache)
    for name in options.choices(models, MODELS):
        size = batch or MODELS[name].size
        for dtype in options.choices(dtypes, options.DTYPES):
            for policy in names:
                row_case = {"model": name, "batch": size, "dtype": dtype, "policy": policy, "backend": backend}
                start = partial(run, name, size, dtype, device, backend)
                starts = attempt(row_case, partial(measure, start, policy, patience))
                for cache in ("cold", "warm"):
                    results.add(Row({**row_case, "cache": cache}, starts.figures.get(cache, starts.figures)))
    results.close(TITLE, COLUMNS)


if __name__ == "__main__":
    app()
