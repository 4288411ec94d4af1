"""``fp4graph export``: write a trained model as a checkpoint of FP4 weights for servers."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

import fp4graph
from fp4graph.commands.models import architecture, with_inputs
from fp4graph.commands.output import say
from fp4graph.errors import Error, needs

#: The number of a run's validation batches on which tensor scales of activations are measured.
CALIBRATION = 4
#: The dtypes of ``--autocast``, by torch's names.
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


def export(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT", help="A run's folder, its checkpoint.pt, or the folder of a Hugging Face model."
        ),
    ],
    output: Annotated[Path, typer.Option(help="The folder to make.")],
    layout: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="compressed-tensors, modelopt or gpt-oss.")
    ] = "compressed-tensors",
    policy: Annotated[
        str | None, typer.Option(help="The policy of a Hugging Face model's training; a run records its policy.")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave activations out; servers then keep them in high precision.")
    ] = False,
    sibling_scales: Annotated[
        str,
        typer.Option(
            help="What to do if matrices that servers fuse, such as q, k and v, have different tensor scales: refuse; "
            "share, to write one scale and print the resulting error; or own, for readers that fuse nothing."
        ),
    ] = "refuse",
    autocast: Annotated[
        str | None, typer.Option(help="The autocast dtype of a Hugging Face model's training: bf16 or fp16.")
    ] = None,
) -> None:
    """Write a trained model as a checkpoint of real FP4 weights, for vLLM, transformers and others.

    The weights equal those of fprop. Tensor scales of a run's activations are measured on a few validation batches.

    fp4graph export runs/digits-tetrajet-adam-0 --output served
    """
    options = {"format": layout, "activations": not weights_only, "sibling_scales": sibling_scales}
    source = source.parent if source.name == "checkpoint.pt" else source
    if (source / "run.json").exists():
        if policy is not None or autocast is not None:
            raise Error("a run records its policy and its autocast; leave --policy and --autocast out")
        _export_run(source, output, options)
    elif (source / "config.json").exists():
        if policy is None:
            raise Error(f"{source} does not record the policy of its training; give it with --policy")
        if autocast is not None and autocast not in _AUTOCAST:
            raise Error(f"--autocast takes {' or '.join(_AUTOCAST)}; got {autocast!r}")
        _export_model(source, policy, autocast, output, options)
    else:
        raise Error(
            f"{source} is neither the folder of a run (run.json) nor of a Hugging Face model (config.json); export "
            "other models in Python, with fp4graph.export(model, folder)"
        )
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    say(f"{output}: {layout}, {size / 2**20:.2f} MiB of weights")


def _export_run(folder: Path, output: Path, options: dict[str, Any]) -> None:
    import torch

    from fp4graph.lab.runs.train import restored

    run = restored(folder)
    calls = [partial(run.measure, batch) for batch in islice(run.problem.validation(), CALIBRATION)]
    with torch.no_grad(), run.autocast():
        calls[0]()  # captures the model
        fp4graph.export(run.model, output, calibration=calls, **options)


def _export_model(folder: Path, policy: str, autocast: str | None, output: Path, options: dict[str, Any]) -> None:
    """Export the model of a folder under ``policy``, with the techniques' state that the folder holds."""
    needs("transformers", f"{folder} is read with transformers", "export")
    import torch
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(str(folder))
    kind = architecture(config, folder / "config.json")
    if getattr(config, "quantization_config", None):
        raise Error(f"{folder} is already quantized; export the folder that training wrote")
    model: Any = fp4graph.apply(kind.from_pretrained(str(folder), config=config), policy, backend="eager")
    with torch.autocast("cpu", getattr(torch, _AUTOCAST[autocast])) if autocast is not None else nullcontext():
        with torch.no_grad():
            _capture(model.eval(), folder)
        fp4graph.export(model, output, **options)


def _capture(model: Any, folder: Path) -> None:
    """Call the model of a folder once, with the tokens that transformers has for the model, or with zeros."""
    remedy = "call the applied model once in Python, and export it with fp4graph.export(model, folder)"
    try:
        # Zeros are no text for every model: some need a token that ends it.
        inputs = model.dummy_inputs if model.main_input_name == "input_ids" else with_inputs(str(folder), model).kwargs
    except Error:
        raise Error(f"the inputs of {folder} are unknown; {remedy}") from None
    try:
        model(**inputs)
    except Error:
        raise
    except Exception as error:
        raise Error(
            f"{folder}: the forward of a small batch raised {type(error).__name__}: {error}; {remedy}"
        ) from error
