"""``fp4graph strip-state``: remove the state of techniques from a file of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4graph.commands.output import say
from fp4graph.errors import Error, needs


def strip_state(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .safetensors file, or a file of torch.save.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write, of the same kind.")],
) -> None:
    """Write a file of weights without the state of techniques, so that it loads into the plain model.

    Everything else in the file stays: nested state dicts, optimizer, epoch, metadata.

    fp4graph strip-state model.safetensors plain.safetensors
    """
    from fp4graph.training.stripping import strip_pickled, strip_safetensors

    if (source.suffix == ".safetensors") != (target.suffix == ".safetensors"):
        raise Error("IN and OUT must be of the same kind: both .safetensors, or both of torch.save")
    if not source.is_file():
        raise Error(f"file {str(source)!r} does not exist; give a file of weights")
    try:
        if source.suffix == ".safetensors":
            needs("safetensors", "such files are read with safetensors", "export")
            removed = strip_safetensors(source, target)
        else:
            removed = strip_pickled(source, target)
    except OSError as error:
        raise Error(f"cannot write {target}: {error.strerror or error}; make room, or give another place") from error
    say(f"{target}: without {removed} entries of {source}")
