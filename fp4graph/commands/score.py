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
Studies = Annotated[list[str] | None, typer.Option(help="Only this study of them; may be given several times.")]
RuleOption = Annotated[str, typer.Option(help="text: S = G/(1 + Ω); table: S = G/max(1, Ω), G·max(1, Ω) below 0.")]


def score(
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SWEEP]...", help=_SOURCES)] = None,
    study: Studies = None,
    rule: RuleOption = "table",
    every: Annotated[bool, typer.Option("--all", help="Every trial, best first, not only the best.")] = False,
    choices: Annotated[
        bool, typer.Option("--choices", help="What each choice of each parameter came to, not the best.")
    ] = False,
    export: Annotated[
        list[Path] | None, typer.Option(help="Write all trials to this .csv or .json file; may be given twice.")
    ] = None,
    as_json: AsJson = False,
    loss: Annotated[float | None, typer.Option(help="Without a sweep: the validation loss of a run,")] = None,
    reference: Annotated[float | None, typer.Option(help="that of the better unquantized baseline,")] = None,
    complexity: Annotated[float | None, typer.Option(help="and Ω of its policy.")] = None,
) -> None:
    """Print the best of each family in sweeps, or the score of three numbers."""
    chosen = known_rule(rule)
    numbers = (loss, reference, complexity)
    if sources and any(number is not None for number in numbers):
        raise Error("give sweeps, or --loss, --reference and --complexity; not both")
    if not sources:
        if loss is None or reference is None or complexity is None:
            raise Error("name a sweep's folder or database, or give --loss, --reference and --complexity")
        try:
            print(f"{score_of(loss, reference, complexity, chosen):.6g}")
        except ValueError as error:
            raise Error(str(error)) from None
        return

    if every and choices:
        raise Error("give --all or --choices; not both")
    found = read(sources, study)
    from fp4graph.commands.sweep_tables import best_table, effects_table, trial_table
    from fp4graph.lab.sweeps.results import to_csv, to_json

    for path in export or []:
        if path.suffix not in (".csv", ".json"):
            raise Error(f"--export {path}: write .csv or .json")
        write(path, to_csv(found) if path.suffix == ".csv" else to_json(found))
    if as_json:
        say(to_json(found, choices=choices).rstrip("\n"))
        return
    console = wide_console()
    for one in found:
        if choices:
            console.print(effects_table(one))
        elif every:
            ranked = sorted(one.trials, key=lambda s: (s.scores[chosen] is None, -(s.scores[chosen] or 0.0)))
            console.print(trial_table(ranked, chosen, one.name))
        else:
            console.print(best_table(one, chosen))


def pareto(
    sources: Annotated[list[str], typer.Argument(metavar="SWEEP...", help=_SOURCES)],
    study: Studies = None,
    rule: RuleOption = "table",
    output: Annotated[Path, typer.Option(help="The picture: .png, .pdf or .svg.")] = Path("pareto.png"),
) -> None:
    """Draw complexity against score, a panel per sweep, and name the points on the frontier."""
    from fp4graph.lab.sweeps.pareto import png
    from fp4graph.lab.sweeps.results import frontier

    chosen = known_rule(rule)
    form = output.suffix.lstrip(".")
    if form not in (forms := ("png", "pdf", "svg")):
        raise Error(f"--output {output}: write a file that ends in .{', .'.join(forms)}")
    found = read(sources, study)
    write(output, png(found, chosen, form))
    for one in found:
        for family in one.families:
            for s in frontier(one.complete_of(family), chosen):
                figures = f"Ω {s.trial.complexity:g}  score {s.scores[chosen]:+.4f}  loss {s.trial.loss:.4g}"
                say(f"{one.name}  {family}  trial {s.trial.number}  {s.trial.summary}  {figures}")
    say(str(output))


def read(sources: list[str], only: list[str] | None) -> list[Results]:
    """Return the results of all sweeps in ``sources``, or of those named; raise an Error if there is no such sweep."""
    needs("optuna", "sweeps are read by Optuna", "sweep")
    import optuna

    import fp4graph
    from fp4graph.lab.sweeps import database
    from fp4graph.lab.sweeps.study import Study

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    urls = [database.url_of(source, existing=True) for source in sources]
    known = [(url, name) for url in urls for name in database.sweeps(url)]
    names = sorted({name for _, name in known})
    if not names:
        raise Error(f"{', '.join(sources)}: there is no sweep; name what fp4graph sweep wrote")
    for name in only or []:
        if name not in names:
            raise Error(f"{', '.join(sources)}: there is no study {name!r}; there is {', '.join(names)}")
    found = []
    for url, name in known:
        if only is None or name in only:
            study = Study.open(url, name)
            made, here = study.manifest.fp4graph, fp4graph.__version__
            if made != here:
                warn(f"study {name!r} was made by fp4graph {made}; this is {here}")
            found.append(study.results())
    return found
