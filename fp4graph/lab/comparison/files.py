"""Writes a comparison as one HTML page, as CSV and LaTeX, and as figures for a paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fp4graph.files import replacing, write
from fp4graph.lab.comparison.result import Comparison, shown
from fp4graph.lab.pages import rendered
from fp4graph.lab.pictures import panels
from fp4graph.lab.pictures.style import PALETTE, styled, subplots, svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_all(result: Comparison) -> None:
    """Write ``report.html``, ``table.csv``, ``table.tex``, ``loss.svg`` and ``loss.pdf`` into the comparison's folder.

    Raises:
        Error: a file cannot be written.
    """
    import pandas as pd

    frame = pd.DataFrame(result.rows, dtype=object)  # in which a count beside None stays whole
    for state in ("diverged", "failed"):
        frame[state] = frame[state].map(len)
    cells = [shown(row, result.metrics) for row in result.rows]
    write(result.folder / "table.csv", frame.to_csv(index=False))
    write(result.folder / "table.tex", as_tex(cells))
    picture = losses(result)
    if picture is not None:
        import matplotlib as mpl

        for kind in ("svg", "pdf"):
            with mpl.rc_context({"pdf.fonttype": 42}), replacing(result.folder / f"loss.{kind}") as file:  # TrueType
                picture.savefig(file, format=kind)
    others = [policy.name for policy in result.policies if policy.name != result.baseline]
    page = rendered(
        "compare.html.jinja",
        result=result,
        rows=cells,
        verdict=result.verdict.split("\n"),
        curves=None if picture is None else svg(picture, "losses"),
        worst=[(name, rows) for name in others if (rows := result.worst(name))],
        failed=[run for run in result.runs if run["state"] != "finished"],
        planned=len(result.policies) * len(result.seeds),
    )
    write(result.folder / "report.html", page)


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
    picture, axes = subplots(3.2, width=4.6)  # inches, two thirds of a text's width
    for place, (name, curve) in enumerate(curves.items()):
        baseline = name == result.baseline
        color = "#333333" if baseline else PALETTE[(place - 1) % len(PALETTE)]
        panels.band(axes, curve, color, name, dashed=baseline)
    panels.loss_scale(axes, [loss for curve in curves.values() for values in curve.values() for loss in values])
    seeds = len(result.seeds)
    axes.set_xlabel("step")
    axes.legend(title=f"mean of {seeds} seeds, shaded: range" if seeds > 1 else None, title_fontsize=8.5)
    return picture


def as_tex(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table as a LaTeX ``tabular`` with the rules of booktabs."""
    import pandas as pd

    columns = "l" + "r" * (len(rows[0]) - 1)
    text = str(pd.DataFrame(rows).to_latex(index=False, escape=True, column_format=columns))
    return text.replace("±", r"$\pm$").replace("Ω", r"$\Omega$").replace("×", r"$\times$").replace("–", "--")
