"""``fp4graph pareto``: the figure of score over complexity."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4graph.commands.score import RuleOption, Studies, read
from fp4graph.commands.sweep import known_rule
from fp4graph.errors import Error
from fp4graph.files import write

FORMATS = ("png", "pdf", "svg")


def pareto(
    sources: Annotated[
        list[str], typer.Argument(metavar="SWEEP...", help="A sweep's folder, an SQLite file, or a database URL.")
    ],
    study: Studies = None,
    rule: RuleOption = "table",
    output: Annotated[Path, typer.Option(help="The picture: .png, .pdf or .svg.")] = Path("pareto.png"),
) -> None:
    """Draw complexity against score, a panel per sweep, and name the points on the frontier."""
    from fp4graph.experiments.pareto import png
    from fp4graph.experiments.results import frontier

    chosen = known_rule(rule)
    form = output.suffix.lstrip(".")
    if form not in FORMATS:
        raise Error(f"--output {output}: write a file that ends in .{', .'.join(FORMATS)}")
    found = read(sources, study)
    write(output, png(found, chosen, form))
    for one in found:
        for family in one.families:
            for s in frontier(one.complete_of(family), chosen):
                figures = f"Ω {s.trial.complexity:g}  score {s.scores[chosen]:+.4f}  loss {s.trial.loss:.4g}"
                print(f"{one.name}  {family}  trial {s.trial.number}  {s.trial.summary}  {figures}")
    print(output)
