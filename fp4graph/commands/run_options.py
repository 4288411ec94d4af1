"""The command-line options for the settings of a run; ``train``, ``compare`` and ``sweep`` share them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

_Option = partial(typer.Option, rich_help_panel="Settings of a task")


def _options(
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data order, noise, and a sweep's draws.")] = 0,
    steps: Annotated[int | None, _Option(help="Length of a training in optimizer steps. [the task's]")] = None,
    epochs: Annotated[float | None, _Option(help="Length of a training in epochs. [the task's]")] = None,
    lr: Annotated[float | None, _Option(help="Learning rate. [the task's]")] = None,
    batch_size: Annotated[int | None, _Option(help="Samples per forward pass. [the task's]")] = None,
    accumulate: Annotated[int | None, _Option(help="Forward passes per step. [the task's]")] = None,
    optimizer: Annotated[str | None, _Option(help="adam, adamw, sgd or stablespam. [the task's]")] = None,
    weight_decay: Annotated[float | None, _Option(help="Weight decay of matrices. [the task's]")] = None,
    schedule: Annotated[
        str | None, _Option(help="Learning rate schedule: constant, cosine or timm. [the task's]")
    ] = None,
    warmup: Annotated[float | None, _Option(help="Warm-up as a share of the steps. [the task's]")] = None,
    clip: Annotated[float | None, _Option(help="Clip the gradient to this norm; 0 does not clip. [the task's]")] = None,
    dtype: Annotated[
        str | None, _Option(help="Parameters' dtype: fp32, or bf16 without an fp32 copy. [the task's]")
    ] = None,
    autocast: Annotated[
        bool | None, _Option("--autocast/--no-autocast", help="GEMMs in bf16, parameters in fp32. [the task's]")
    ] = None,
    validate_every: Annotated[
        int | None, _Option(help="Steps between validations. [from the task's number of validations]")
    ] = None,
    validation_batches: Annotated[int | None, _Option(help="Largest number of batches in a validation. [all]")] = None,
    device: Annotated[
        str, _Option(help="cpu, cuda, cuda:1, ...; auto is CUDA if available. A sweep's workers share GPUs.")
    ] = "auto",
    backend: Annotated[
        str | None, _Option(help="eager, aot_eager or inductor. [inductor on CUDA, eager elsewhere]")
    ] = None,
    mode: Annotated[
        str | None, _Option(help="Mode of torch.compile with inductor: max-autotune, reduce-overhead, ...")
    ] = None,
    data: Annotated[
        str | None, _Option(help="Source of the data; fp4graph train --list shows what each task takes.")
    ] = None,
) -> None: ...


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``**settings``, the last parameter in the signature of ``command``, by the options of a run."""
    signature = inspect.signature(command, eval_str=True)
    shared = inspect.signature(_options, eval_str=True).parameters.values()
    parameters = [*list(signature.parameters.values())[:-1], *shared]
    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command
