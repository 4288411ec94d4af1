"""``fp4graph strip-state``: remove the state of techniques from a file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fp4graph
from fp4graph.commands.output import say


def strip_state(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .safetensors file, or a file of torch.save.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, of the same kind.")],
) -> None:
    """Write a file of weights without the state of techniques, so that it loads into the plain model.

    Everything else in the file stays: nested state dicts, optimizer, epoch, metadata.

    fp4graph strip-state model.safetensors plain.safetensors
    """
    removed = fp4graph.training.strip_file(source, target)
    say(f"{target}: without {removed} entries of {source}")
