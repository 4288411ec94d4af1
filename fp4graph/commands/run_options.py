"""The options that train, compare and sweep share: the settings of a run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

_Option = partial(typer.Option, rich_help_panel="Settings of a task")


def _options(
    seed: Annotated[int, typer.Option(min=0, help="Of weights, data order, noise, and a sweep's draws.")] = 0,
    steps: Annotated[int | None, _Option(help="Length of a training, in steps of the optimizer.")] = None,
    epochs: Annotated[float | None, _Option(help="The same in epochs. [the task's]")] = None,
    lr: Annotated[float | None, _Option(help="Learning rate. [the task's]")] = None,
    batch_size: Annotated[int | None, _Option(help="Samples per forward pass. [the task's]")] = None,
    accumulate: Annotated[int | None, _Option(help="Forward passes per step. [the task's]")] = None,
    optimizer: Annotated[str | None, _Option(help="adam, adamw, sgd or stablespam. [the task's]")] = None,
    weight_decay: Annotated[float | None, _Option(help="Of matrices. [the task's]")] = None,
    schedule: Annotated[str | None, _Option(help="constant, cosine or timm. [the task's]")] = None,
    warmup: Annotated[float | None, _Option(help="Share of the steps. [the task's]")] = None,
    clip: Annotated[float | None, _Option(help="Norm of the gradient; 0 for none. [the task's]")] = None,
    dtype: Annotated[
        str | None, _Option(help="Of the parameters: fp32, or bf16 without an fp32 copy. [the task's]")
    ] = None,
    autocast: Annotated[
        bool | None, _Option("--autocast/--no-autocast", help="GEMMs in bf16, parameters in fp32. [the task's]")
    ] = None,
    validate_every: Annotated[int | None, _Option(help="Steps. [about 20 times in all]")] = None,
    validation_batches: Annotated[int | None, _Option(help="At most so many. [all]")] = None,
    device: Annotated[
        str, _Option(help="cpu, cuda, cuda:1, ...; auto is CUDA where there is one. A sweep's workers share GPUs.")
    ] = "auto",
    backend: Annotated[
        str | None, _Option(help="eager, aot_eager or inductor. [inductor on CUDA, eager elsewhere]")
    ] = None,
    mode: Annotated[
        str | None, _Option(help="torch.compile's, with inductor: max-autotune, reduce-overhead, ...")
    ] = None,
    data: Annotated[
        str | None, _Option(help="Where the data is; fp4graph train --list says what a task takes.")
    ] = None,
) -> None: ...


def run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the last parameter of ``command``, ``**settings``, by the options of a run, for typer to read."""
    own = inspect.signature(command, eval_str=True)
    shared = inspect.signature(_options, eval_str=True).parameters.values()
    command.__signature__ = own.replace(parameters=[*list(own.parameters.values())[:-1], *shared])  # type: ignore[attr-defined]
    return command
