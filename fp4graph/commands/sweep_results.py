"""``fp4graph sweep-results``: the trials of sweeps as tables, files and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4graph.commands.output import AsJson, say, warn, wide_console
from fp4graph.commands.sweep import known_rule
from fp4graph.errors import Error, needs
from fp4graph.files import write

if TYPE_CHECKING:
    from fp4graph.lab.sweeps.results import Results


def sweep_results(
    sources: Annotated[
        list[str], typer.Argument(metavar="SWEEP...", help="Sweeps' folders, SQLite files, or database URLs.")
    ],
    study: Annotated[list[str] | None, typer.Option(help="Show only this study; repeat the option for more.")] = None,
    rule: Annotated[
        str, typer.Option(help="Formula of S: text: G/(1 + Ω); table: G/max(1, Ω), or G·max(1, Ω) for G < 0.")
    ] = "table",
    every: Annotated[bool, typer.Option("--all", help="Show every trial, best first.")] = False,
    choices: Annotated[
        bool, typer.Option("--choices", help="Show the losses of each choice of each parameter.")
    ] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Draw S over Ω, a panel per sweep, into this .png, .pdf or .svg.")
    ] = None,
    export: Annotated[
        list[Path] | None, typer.Option(help="Write all trials to this .csv or .json file; repeat the option for both.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the baselines of sweeps, and each family's pure FP4 and trials of lowest loss and highest score S.

    G is the share by which a trial reduces the loss of the better unquantized baseline; Ω is its policy's complexity.
    """
    from fp4graph.commands.sweep_tables import best_table, effects_table, trial_table
    from fp4graph.lab.sweeps.pareto import png
    from fp4graph.lab.sweeps.results import to_csv, to_json

    chosen = known_rule(rule)
    if every and choices:
        raise Error("give --all or --choices; not both")
    _require_kind("--picture", [picture] if picture else [], (".png", ".pdf", ".svg"))
    _require_kind("--export", export or [], (".csv", ".json"))
    studies = read(sources, study)
    for path in export or []:
        write(path, to_csv(studies) if path.suffix == ".csv" else to_json(studies))
    if picture:
        write(picture, png(studies, chosen, picture.suffix.removeprefix(".")))
    if as_json:
        say(to_json(studies, choices=choices).rstrip("\n"))
        return
    console = wide_console()
    for results in studies:
        if choices:
            console.print(effects_table(results))
        elif every:
            ranked = sorted(results.trials, key=lambda s: (s.scores[chosen] is None, -(s.scores[chosen] or 0.0)))
            console.print(trial_table(ranked, chosen, results.name))
        else:
            console.print(best_table(results, chosen))


def _require_kind(option: str, paths: list[Path], suffixes: tuple[str, ...]) -> None:
    for path in paths:
        if path.suffix not in suffixes:
            raise Error(f"{option} {path}: give a file that ends in {' or '.join(suffixes)}")


def read(sources: list[str], only: list[str] | None) -> list[Results]:
    """Return the results of the studies in ``sources``, all or ``only`` these; raise an Error if one is missing."""
    needs("optuna", "sweeps are read with Optuna", "sweep")
    import optuna

    import fp4graph
    from fp4graph.lab.sweeps import database
    from fp4graph.lab.sweeps.study import Study

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    urls = [database.url_of(source, existing=True) for source in sources]
    places = [(url, name) for url in urls for name in database.sweeps(url)]
    names = sorted({name for _, name in places})
    if not names:
        raise Error(f"{', '.join(sources)} holds no sweep; give the folder or database of fp4graph sweep")
    for name in only or []:
        if name not in names:
            raise Error(f"{', '.join(sources)} has no study {name!r}; it has {', '.join(names)}")
    results = []
    for url, name in places:
        if only is None or name in only:
            study = Study.open(url, name)
            if (written_by := study.manifest.fp4graph) != fp4graph.__version__:
                warn(f"study {name!r} was made by fp4graph {written_by}; this is {fp4graph.__version__}")
            results.append(study.results())
    return results
