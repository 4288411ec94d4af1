"""What the command lines of the benchmarks share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer

from fp4graph.technique.registry import default_registry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Policies = Annotated[str, typer.Option(help="Shipped names or files, separated by commas; all: every shipped one.")]
Dtypes = Annotated[str, typer.Option(help="float32, bfloat16 or both, separated by commas.")]
Backend = Annotated[str, typer.Option(help="inductor; eager, to try a benchmark out without compiling.")]
Seconds = Annotated[float, typer.Option(min=0, help="Time limit of one comparison, compilation not counted.")]
Repeats = Annotated[int, typer.Option(min=1, help="Pairs of a comparison, at least.")]
Folder = Annotated[Path, typer.Option(help="Of the results.")]


def device_of(name: str) -> torch.device:
    """``name`` as a device that is there."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(str(error).splitlines()[0]) from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here")
    return device


def policies_of(names: str) -> list[str]:
    """Names of policies; ``all`` stands for every shipped one."""
    return sorted(default_registry().policies) if names == "all" else split(names)


def choices(names: str, among: Iterable[str], separator: str = ",") -> list[str]:
    """``names``, each of which must be among the known ones; ``all`` stands for all of them."""
    known = list(among)
    chosen = known if names == "all" else split(names, separator)
    if unknown := [name for name in chosen if name not in known]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(known)}")
    return chosen


def split(names: str, separator: str = ",") -> list[str]:
    """What commas separate."""
    return [name.strip() for name in names.split(separator) if name.strip()]
