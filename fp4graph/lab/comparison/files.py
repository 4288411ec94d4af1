"""Writes a comparison as one HTML page, as CSV and LaTeX, and as figures for a paper."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp4graph.files import replacing, write
from fp4graph.lab.comparison.result import Comparison, shown
from fp4graph.lab.pages import rendered
from fp4graph.lab.pictures import panels
from fp4graph.lab.pictures.style import PALETTE, styled, subplots, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Width and height of the figure in inches: two thirds of a text's width.
SIZE = 4.6, 3.2
_TEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "Ω": r"$\Omega$",
    "×": r"$\times$", "–": "--",
}  # fmt: skip


def write_all(result: Comparison) -> None:
    """Write ``report.html``, ``table.csv``, ``table.tex``, ``loss.svg`` and ``loss.pdf`` into the comparison's folder.

    Raises:
        Error: a file cannot be written.
    """
    write(result.folder / "table.csv", as_csv(result.rows))
    write(result.folder / "table.tex", as_tex([shown(row, result.metrics) for row in result.rows]))
    picture = losses(result)
    if picture is not None:
        import matplotlib as mpl

        for kind in ("svg", "pdf"):
            with mpl.rc_context({"pdf.fonttype": 42}), replacing(result.folder / f"loss.{kind}") as file:  # TrueType
                picture.savefig(file, format=kind)
    write(result.folder / "report.html", page(result, picture))


def page(result: Comparison, picture: Figure | None) -> str:
    """Return the page of a comparison."""
    others = [policy for policy in result.policies if policy.name != result.baseline]
    return rendered(
        "compare.html.jinja",
        result=result,
        rows=[(row, shown(row, result.metrics)) for row in result.rows],
        cells=list(shown(result.rows[0], result.metrics)),
        verdict=result.verdict.split("\n"),
        curves=None if picture is None else svg(picture, "losses"),
        worst=[(policy.name, rows) for policy in others if (rows := result.worst(policy.name))],
        failed=[run for run in result.runs if run["state"] != "finished"],
        planned=len(result.policies) * len(result.seeds),
    )


@styled()
def losses(result: Comparison) -> Figure | None:
    """Draw each policy's loss over steps, the mean over seeds and the range from the lowest to the highest."""
    curves: dict[str, panels.Curve] = {}
    for policy in result.policies:
        runs = [run for run in result.runs if run["policy"] == policy.name and run["state"] != "failed"]
        if curve := panels.gathered((step, loss) for run in runs for step, loss in run["curve"]):
            curves[policy.name] = dict(sorted(curve.items()))
    if not curves:
        return None
    picture, axes = subplots(SIZE[1], width=SIZE[0])
    for place, (name, curve) in enumerate(curves.items()):
        baseline = name == result.baseline
        color = "#333333" if baseline else PALETTE[(place - 1) % len(PALETTE)]
        panels.band(axes, curve, color, name, dashed=baseline)
    panels.loss_scale(axes, [loss for curve in curves.values() for values in curve.values() for loss in values])
    seeds = len(result.seeds)
    axes.set_xlabel("step")
    axes.legend(title=f"mean of {seeds} seeds, shaded: range" if seeds > 1 else None, title_fontsize=8.5)
    return picture


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as CSV, numbers in full; the lists of diverged and failed runs become their lengths."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    table.writeheader()
    for row in rows:
        table.writerow({name: len(value) if isinstance(value, list) else value for name, value in row.items()})
    return text.getvalue()


def as_tex(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table as a LaTeX ``tabular`` with the rules of booktabs."""
    lines = [" & ".join(map(_escaped, row)) + r" \\" for row in (list(rows[0]), *(row.values() for row in rows))]
    begin = f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}"
    return "\n".join([begin, r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule", r"\end{tabular}", ""])


def _escaped(text: str) -> str:
    return "".join(_TEX.get(character, character) for character in text)
