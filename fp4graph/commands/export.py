"""``fp4graph export``: a trained model as a checkpoint of FP4 weights that others serve."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from fp4graph.commands.models import architecture
from fp4graph.commands.output import say
from fp4graph.errors import Error
from fp4graph.lab.data.extras import needs

#: The dtypes of ``--autocast``.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


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
        str | None, typer.Option(help="The policy of a Hugging Face model, whose folder does not say it.")
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Say nothing of activations, which servers then leave alone.")
    ] = False,
    sibling_scales: Annotated[
        str,
        typer.Option(
            help="Of matrices that servers fuse, such as q, k and v, under tensor scales that differ: refuse; share, "
            "which prints the error that this makes; or own, for readers that fuse nothing."
        ),
    ] = "refuse",
    autocast: Annotated[
        str | None, typer.Option(help="bf16 or fp16: the dtype of autocast in training, of a Hugging Face model.")
    ] = None,
) -> None:
    """Write a trained model as a checkpoint of real FP4 weights, for vLLM, transformers and others.

    The weights are those that fprop multiplied with. Tensor scales of a run's activations are measured on a few of its
    validation batches.

    fp4graph export runs/digits-tetrajet-adam-0 --output served
    """
    options = {"format": layout, "activations": not weights_only, "sibling_scales": sibling_scales}
    source = source.parent if source.name == "checkpoint.pt" else source
    if (source / "run.json").exists():
        if policy is not None or autocast is not None:
            raise Error("a run says its policy and its autocast itself; leave --policy and --autocast out")
        _export_run(source, output, options)
    elif (source / "config.json").exists():
        if policy is None:
            raise Error(f"{source} does not say under which policy it was trained; give it with --policy")
        if autocast is not None and autocast not in _AUTOCAST:
            raise Error(f"--autocast takes {' or '.join(_AUTOCAST)}; got {autocast!r}")
        model = _hugging_face(source, policy)
        with torch.autocast("cpu", _AUTOCAST[autocast]) if autocast is not None else nullcontext():
            _export_model(model, output, options)
    else:
        raise Error(
            f"{source} is neither the folder of a run (run.json) nor of a Hugging Face model (config.json); other "
            "models are exported in Python, by fp4graph.export(model, folder)"
        )
    size = sum(file.stat().st_size for file in output.glob("*.safetensors"))
    say(f"{output}: {layout}, {size / 2**20:.2f} MiB of weights")


def _export_run(folder: Path, output: Path, options: dict[str, Any]) -> None:
    from fp4graph import export as write
    from fp4graph.lab.runs.restore import restore

    run = restore(folder)
    calls = [partial(run.measure, batch) for batch in run.batches]
    with run.autocast():
        write(run.model, output, calibration=calls, **options)


def _export_model(model: nn.Module, output: Path, options: dict[str, Any]) -> None:
    from fp4graph import export as write

    inputs: Any = model.dummy_inputs
    with torch.no_grad():
        model.eval()(**inputs)
    write(model, output, **options)


def _hugging_face(folder: Path, policy: str) -> nn.Module:
    """Return the model of a folder under ``policy``, with the state of techniques that was saved beside it."""
    needs("transformers", f"{folder} is read by transformers", "export")
    import transformers

    import fp4graph

    config: Any = transformers.AutoConfig.from_pretrained(str(folder))
    kind = architecture(config, folder / "config.json")
    if getattr(config, "quantization_config", None):
        raise Error(f"{folder} is quantized already; export the folder that training wrote")
    model: nn.Module = kind.from_pretrained(str(folder), config=config)
    return fp4graph.apply(model, policy, backend="eager")
