"""``fp4graph score`` and ``fp4graph pareto``: the results of sweeps, and the figure of score over complexity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4graph.commands.output import AsJson, say, warn, wide_console
from fp4graph.commands.sweep import known_rule
from fp4graph.errors import Error
from fp4graph.files import write
from fp4graph.lab.data.extras import needs
from fp4graph.lab.sweeps.results import Results
from fp4graph.lab.sweeps.results import score as score_of

_SOURCES = "A sweep's folder, an SQLite file, or a database URL."
Studies = Annotated[list[str] | None, typer.Option(help="Show only this study; repeat it for more.")]
RuleOption = Annotated[str, typer.Option(help="text: S = G/(1 + Ω); table: S = G/max(1, Ω), G·max(1, Ω) below 0.")]


def score(
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SWEEP]...", help=_SOURCES)] = None,
    study: Studies = None,
    rule: RuleOption = "table",
    every: Annotated[bool, typer.Option("--all", help="Show every trial, best first.")] = False,
    choices: Annotated[
        bool, typer.Option("--choices", help="Show the losses of each choice of each parameter.")
    ] = False,
    export: Annotated[
        list[Path] | None, typer.Option(help="Write all trials to this .csv or .json file; repeat it for both.")
    ] = None,
    as_json: AsJson = False,
    loss: Annotated[float | None, typer.Option(help="Without a sweep: the validation loss of a run.")] = None,
    reference: Annotated[
        float | None, typer.Option(help="Without a sweep: the loss of the better unquantized baseline.")
    ] = None,
    complexity: Annotated[float | None, typer.Option(help="Without a sweep: Ω of the run's policy.")] = None,
) -> None:
    """Print the best trials of each family in sweeps, or the score of a loss, a reference and a complexity."""
    chosen = known_rule(rule)
    numbers = (loss, reference, complexity)
    if sources and any(number is not None for number in numbers):
        raise Error("give sweeps, or --loss, --reference and --complexity; not both")
    if not sources:
        if loss is None or reference is None or complexity is None:
            raise Error("give a sweep's folder or database, or --loss, --reference and --complexity")
        try:
            print(f"{score_of(loss, reference, complexity, chosen):.6g}")
        except ValueError as error:
            raise Error(str(error)) from None
        return

    if every and choices:
        raise Error("give --all or --choices; not both")
    studies = read(sources, study)
    from fp4graph.commands.sweep_tables import best_table, effects_table, trial_table
    from fp4graph.lab.sweeps.results import to_csv, to_json

    for path in export or []:
        if path.suffix not in (".csv", ".json"):
            raise Error(f"--export {path}: give a file that ends in .csv or .json")
        write(path, to_csv(studies) if path.suffix == ".csv" else to_json(studies))
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


def pareto(
    sources: Annotated[list[str], typer.Argument(metavar="SWEEP...", help=_SOURCES)],
    study: Studies = None,
    rule: RuleOption = "table",
    output: Annotated[Path, typer.Option(help="The picture: .png, .pdf or .svg.")] = Path("pareto.png"),
) -> None:
    """Draw score over complexity, a panel per sweep, and list the trials on the frontiers."""
    from fp4graph.lab.sweeps.pareto import png
    from fp4graph.lab.sweeps.results import frontier

    chosen = known_rule(rule)
    form = output.suffix.lstrip(".")
    if form not in (forms := ("png", "pdf", "svg")):
        raise Error(f"--output {output}: give a file that ends in .{', .'.join(forms)}")
    studies = read(sources, study)
    write(output, png(studies, chosen, form))
    for results in studies:
        for family in results.families:
            for s in frontier(results.complete_of(family), chosen):
                figures = f"Ω {s.trial.complexity:g}  score {s.scores[chosen]:+.4f}  loss {s.trial.loss:.4g}"
                say(f"{results.name}  {family}  trial {s.trial.number}  {s.trial.summary}  {figures}")
    say(str(output))


def read(sources: list[str], only: list[str] | None) -> list[Results]:
    """Return the results of the sweeps in ``sources``, all or those named; raise an Error if a sweep is missing."""
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
