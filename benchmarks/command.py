"""The command line of a benchmark: the options that benchmarks share, and what happens to the cases."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer

import fp4graph
from benchmarks import tables
from benchmarks.models import DTYPES, MODELS
from benchmarks.processes import Figures, attempt
from benchmarks.results import RESULTS, Results
from benchmarks.timing import Patience
from fp4graph.technique.registry import default_registry

Models = Annotated[str, typer.Option(help=f"Any of {', '.join(MODELS)}.")]
Policies = Annotated[str, typer.Option(help="Shipped names or files, separated by commas; all: every shipped policy.")]
Dtypes = Annotated[str, typer.Option(help="float32, bfloat16 or both, separated by commas.")]
Batch = Annotated[int | None, typer.Option(min=1, help="Images or sequences. [16 images, 8 sequences]")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")]
Folder = Annotated[Path, typer.Option(help="Folder of the results.")]
Backend = Literal["inductor", "aot_eager", "eager"]
_SHARED: dict[str, tuple[Any, Any]] = {
    "device": (Device, "cpu"),
    "backend": (Annotated[Backend, typer.Option(help="eager tries without compiling.")], "inductor"),
    "seconds": (Annotated[float, typer.Option(min=0, help="Time limit of a comparison, without compilation.")], 30.0),
    "repeats": (Annotated[int, typer.Option(min=3, help="Least number of pairs of a settled ratio.")], 11),
    "folder": (Folder, RESULTS),
}
#: Each case, in plain values, with the function that returns its figures.
Cases = Iterator[tuple[Mapping[str, Any], Callable[[], Figures]]]


@dataclass(frozen=True)
class Settings:
    """The values of the shared options."""

    device: torch.device
    backend: str
    patience: Patience


class Benchmark:
    """A command that measures cases, stores them as rows, and prints their table.

    Args:
        name: also begins the names of its files.
        title, columns: of the table.
        cases: yields the cases. It takes settings and then options of its own; its module's docstring is the help.
        without: names of shared options that the command lacks.
        defaults: of shared options.
    """

    def __init__(
        self,
        name: str,
        title: str,
        columns: Sequence[tables.Column],
        cases: Callable[..., Cases],
        without: Sequence[str] = (),
        **defaults: float,
    ) -> None:
        self.name, self.title, self.columns = name, title, columns

        def main(
            context: typer.Context,
            folder: Path,
            device: str = "cpu",
            backend: str = "inductor",
            seconds: float = 0.0,
            repeats: int = 1,
            **own: Any,
        ) -> None:
            results = Results(name, context.params, device_of(device), folder)
            patience = Patience(seconds, repeats, max(repeats, Patience.most))
            for case, measure in cases(Settings(device_of(device), backend, patience), **own):
                results.add(case, attempt(measure))
            tables.show(title, columns, results.rows)
            print(f"all repeats, machine and versions: {results.file}")
            raise typer.Exit(int(any("failed" in row["figures"] for row in results.rows)))

        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("context", keyword, annotation=typer.Context)]
        own = list(inspect.signature(cases, eval_str=True).parameters.values())[1:]
        parameters += [parameter.replace(kind=keyword) for parameter in own]
        for option, (annotation, default) in _SHARED.items():
            if option not in without:
                value = defaults.get(option, default)
                parameters.append(inspect.Parameter(option, keyword, default=value, annotation=annotation))
        main.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.app = typer.Typer(add_completion=False)
        self.app.command(help=inspect.getmodule(cases).__doc__)(main)


def trainings(models: str, dtypes: str, batch: int | None) -> Iterator[tuple[str, int, str]]:
    """Yield model, size of the batch, by default the model's, and dtype."""
    for model in choices(models, MODELS):
        for dtype in choices(dtypes, DTYPES):
            yield model, batch or MODELS[model].size, dtype


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
    """Return names of policies; ``all`` stands for every shipped policy. Raise BadParameter if one cannot be loaded."""
    if names == "all":
        return sorted(default_registry().policies)
    for name in split(names):
        try:
            fp4graph.load_policy(name)
        except fp4graph.Error as error:
            raise typer.BadParameter(str(error)) from None
    return split(names)


def choices(names: str, among: Iterable[str], separator: str = ",") -> list[str]:
    """Return the names in ``names``, each of which must be in ``among``; ``all`` stands for all of ``among``."""
    valid = list(among)
    chosen = valid if names == "all" else split(names, separator)
    if unknown := [name for name in chosen if name not in valid]:
        raise typer.BadParameter(f"{', '.join(unknown)}: choose from {', '.join(valid)}")
    return chosen


def split(names: str, separator: str = ",") -> list[str]:
    """Return the distinct parts of ``names`` between separators."""
    return list(dict.fromkeys(name.strip() for name in names.split(separator) if name.strip()))
