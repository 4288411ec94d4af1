"""Options that the command lines of the benchmarks share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from fp4graph.technique.registry import default_registry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Policies = Annotated[str, typer.Option(help="Shipped names or files, separated by commas; all: every shipped policy.")]
Dtypes = Annotated[str, typer.Option(help="float32, bfloat16 or both, separated by commas.")]
Backend = Annotated[str, typer.Option(help="inductor; eager tries a benchmark without compiling.")]
Seconds = Annotated[float, typer.Option(min=0, help="Time limit of one comparison, compilation not counted.")]
Repeats = Annotated[int, typer.Option(min=1, help="Least number of pairs of a comparison.")]
Folder = Annotated[Path, typer.Option(help="Folder of the results.")]


def device_of(name: str) -> torch.device:
    """Return the device called ``name``; raise BadParameter if torch does not see it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(str(error).splitlines()[0]) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device on this machine")
    return device


def policies_of(names: str) -> list[str]:
    """Return names of policies; ``all`` stands for every shipped policy."""
    return sorted(default_registry().policies) if names == "all" else split(names)


def choices(names: str, among: Iterable[str], separator: str = ",") -> list[str]:
    """Return the names in ``names``, each of which must be in ``among``; ``all`` stands for all of ``among``."""
    valid = list(among)
    chosen = valid if names == "all" else split(names, separator)
    if unknown := [name for name in chosen if name not in valid]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(valid)}")
    return chosen


def split(names: str, separator: str = ",") -> list[str]:
    """Return the parts of ``names`` between separators."""
    return [name.strip() for name in names.split(separator) if name.strip()]
