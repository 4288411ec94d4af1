"""A whole training step, forward, backward and AdamW, under policies beside the unquantized model.

Inductor compiles both. Parameters are fp32; bfloat16 means autocast. Policies with phases are in their first phase, and
``tetrajet-qramping`` in its detection, its most expensive part.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from benchmarks import command, floor, tables
from benchmarks.command import Cases, Settings
from benchmarks.models import DTYPES, MODELS, UNQUANTIZED, Training, explained
from benchmarks.timing import compare

COLUMNS = (
    *tables.cases("model", "batch", "dtype", "policy"),
    *tables.RATIO,
    tables.milliseconds("seconds", "ms"),
    tables.milliseconds("baseline_seconds", "unquantized, ms"),
    tables.figure("floor", "floor"),
    tables.Column("quantized", lambda row: "{quantized} of {sites}".format(**row["figures"])),
)


Start = Callable[[], Training]


def started(model: str, policy: str, size: int, dtype: str, settings: Settings) -> Training:
    training = Training(MODELS[model], policy, size, DTYPES[dtype], settings.device, settings.backend)
    training.compile()
    return training


def measure(model: str, policy: str, size: int, dtype: str, settings: Settings, base: Start) -> dict[str, Any]:
    """Return the figures of one policy beside the training of ``base``, which the first comparison compiles."""
    explanation = explained(MODELS[model], policy, size)
    baseline, training = base(), started(model, policy, size, dtype, settings)
    comparison = compare(baseline.step, training.step, settings.device, settings.patience)
    if not training.step().isfinite():
        raise RuntimeError("the loss is not finite")
    bound = floor.of_sites(explanation.sites, DTYPES[dtype].itemsize, settings.device)
    return {
        **comparison.figures,
        "floor": 1 + bound / comparison.baseline,
        "quantized": explanation.quantized,
        "sites": len(explanation.sites),
    }


def cases(
    settings: Settings,
    models: command.Models = "deit-tiny,deit-small,llama-60m",
    policies: command.Policies = "all",
    dtypes: command.Dtypes = "float32,bfloat16",
    batch: command.Batch = None,
) -> Cases:
    for model, size, dtype in command.trainings(models, dtypes, batch):
        torch._dynamo.reset()
        baseline = cache(partial(started, model, UNQUANTIZED, size, dtype, settings))  # of all policies
        for policy in command.policies_of(policies):
            case = {"model": model, "batch": size, "dtype": dtype, "policy": policy, "backend": settings.backend}
            yield case, partial(measure, model, policy, size, dtype, settings, baseline)


benchmark = command.Benchmark(
    "step", "A whole training step, time to that of the unquantized model", COLUMNS, cases, seconds=60
)
app = benchmark.app

if __name__ == "__main__":
    app()
