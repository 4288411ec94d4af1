"""A whole training step, forward, backward and AdamW, under policies beside the unquantized model.

Inductor compiles both. Parameters are fp32; bfloat16 means autocast. Policies with phases are in their first phase, and
``tetrajet-qramping`` in its detection, its most expensive part.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import torch
import typer

from benchmarks import floor, options, tables
from benchmarks.models import MODELS, UNQUANTIZED, Model, Training, explained
from benchmarks.results import RESULTS, Inapplicable, Results, attempt, figures_of
from benchmarks.timing import Patience, compare

COLUMNS = (
    tables.case("model"),
    tables.case("batch"),
    tables.case("dtype"),
    tables.case("policy"),
    *tables.RATIO,
    tables.milliseconds("seconds", "ms"),
    tables.milliseconds("baseline_seconds", "unquantized, ms"),
    tables.number("floor", "floor"),
    tables.Column("quantized", lambda row: "{quantized} of {sites}".format(**row["figures"])),
)
TITLE = "A whole training step, time to that of the unquantized model"


def measure(
    model: Model,
    policy: str,
    size: int,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    baseline: Training,
    patience: Patience,
) -> dict[str, Any]:
    """Return the figures of one policy beside ``baseline``, which the first comparison compiles."""
    explanation = explained(model, policy, size)
    if explanation.problem:
        raise Inapplicable(explanation.problem.partition(";")[0])
    training = Training(model, policy, size, dtype, device, backend)
    training.compile()
    comparison = compare(baseline.step, training.step, device, patience)
    if not training.step().isfinite():
        raise RuntimeError("the loss is not finite")
    bound = floor.of_sites(explanation.sites, dtype.itemsize, device)
    return {
        **figures_of(comparison),
        "floor": 1 + bound / comparison.baseline,
        "quantized": explanation.quantized,
        "sites": len(explanation.sites),
    }


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    context: typer.Context,
    models: Annotated[str, typer.Option(help=f"Any of {', '.join(MODELS)}.")] = "deit-tiny,deit-small,llama-60m",
    policies: options.Policies = "all",
    dtypes: options.Dtypes = "float32,bfloat16",
    batch: Annotated[int | None, typer.Option(min=1, help="Images or sequences. [16 images, 8 sequences]")] = None,
    device: options.Device = "cpu",
    backend: options.Backend = "inductor",
    seconds: options.Seconds = 60,
    repeats: options.Repeats = 11,
    folder: options.Folder = RESULTS,
) -> None:
    names, torch_device, patience = options.policies_of(policies), options.device_of(device), Patience(seconds, repeats)
    results = Results("step", context, torch_device, folder)
    for name in options.choices(models, MODELS):
        model = MODELS[name]
        size = batch or model.size
        for dtype in options.choices(dtypes, options.DTYPES):
            torch._dynamo.reset()
            kind = options.DTYPES[dtype]
            baseline = Training(model, UNQUANTIZED, size, kind, torch_device, backend)
            baseline.compile()
            for policy in names:
                row_case = {"model": name, "batch": size, "dtype": dtype, "policy": policy, "backend": backend}
                figures = partial(measure, model, policy, size, kind, torch_device, backend, baseline, patience)
                results.add(attempt(row_case, figures))
    results.close(TITLE, COLUMNS)


if __name__ == "__main__":
    app()
