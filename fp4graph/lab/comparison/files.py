"""Writes a comparison as one HTML page, as CSV and LaTeX, and as figures for a paper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fp4graph.files import replacing, write
from fp4graph.lab.comparison.result import Comparison
from fp4graph.lab.pictures import panels
from fp4graph.lab.pictures.style import PALETTE, plain, styled, subplots, svg
from fp4graph.lab.report import rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def write_all(result: Comparison) -> None:
    """Write ``report.html``, ``table.csv``, ``table.tex``, ``loss.svg`` and ``loss.pdf`` into the comparison's folder.

    Raises:
        Error: a file cannot be written.
    """
    import matplotlib as mpl
    import pandas as pd

    frame = pd.DataFrame(result.rows, dtype=object)  # with another dtype, None would turn a column's counts into floats
    for state in ("diverged", "failed"):
        frame[state] = frame[state].map(len)
    write(result.folder / "table.csv", frame.to_csv(index=False))
    write(result.folder / "table.tex", as_tex(result.cells))
    picture = losses(result)
    for kind in ("svg", "pdf") if picture is not None else ():
        with mpl.rc_context({"pdf.fonttype": 42}), replacing(result.folder / f"loss.{kind}") as file:  # TrueType
            picture.savefig(file, format=kind)  # type: ignore[union-attr]
    page = rendered(
        "compare.html.jinja",
        result=result,
        rows=result.cells,
        curves=None if picture is None else svg(picture, "losses"),
        subtracted=picture is not None and len(picture.axes) > 1,
        worst=[(name, rows) for name in result.others if (rows := result.worst(name))],
    )
    write(result.folder / "report.html", page)


@styled()
def losses(result: Comparison) -> Figure | None:
    """Draw each policy's loss over steps, and below, if runs can be subtracted, the loss minus the baseline's.

    Lines are means over seeds; bands span the range over seeds. Returns None if no loss was logged.
    """
    colors = dict(zip(result.others, PALETTE * len(result.others), strict=False)) | {result.baseline: "#333333"}
    points: dict[str, list[tuple[int, float | None]]] = {name: [] for name in (result.baseline, *result.others)}
    for run in result.runs:
        points[run["policy"]] += run["curve"]
    curves = {name: curve for name in points if (curve := panels.gathered(points[name]))}
    differences = {name: curve for name in result.others if (curve := panels.gathered(_differences(result, name)))}
    if not curves:
        return None
    rows, height = (2, 5.0) if differences else (1, 3.2)
    shape: dict[str, Any] = {"squeeze": False, "sharex": True, "height_ratios": (3, 2)[:rows]}
    picture, panes = subplots(height, rows, width=4.6, **shape)  # inches, two thirds of a text's width
    above, below = panes[0][0], panes[-1][0]
    for name, curve in curves.items():
        panels.band(above, curve, colors[name], name, dashed=name == result.baseline)
    panels.loss_scale(above, [loss for curve in curves.values() for values in curve.values() for loss in values])
    for name, curve in differences.items():
        panels.band(below, curve, colors[name], name)
    if differences:
        below.axhline(0, color=colors[result.baseline], linestyle="--", linewidth=1)
        below.set_ylabel(plain(f"minus {result.baseline}"))
    above.set_xlabel("")
    below.set_xlabel("step")
    seeds = len(result.seeds)
    above.legend(title=f"mean of {seeds} seeds, shaded: range" if seeds > 1 else None, title_fontsize=8.5)
    return picture


def _differences(result: Comparison, policy: str) -> Iterator[tuple[int, float | None]]:
    """Yield the points of a policy's finished runs minus those of the baseline's runs with the same seed.

    A point of a long run averages over steps, so only curves with points at the same steps are subtracted.
    """
    references = {run["seed"]: run["curve"] for run in result.of(result.baseline)}
    for run in result.of(policy):
        pairs = list(zip(run["curve"], references.get(run["seed"], ()), strict=False))
        if len(pairs) == len(run["curve"]) and all(point[0] == reference[0] for point, reference in pairs):
            for (step, loss), (_, reference) in pairs:
                yield step, None if loss is None or reference is None else loss - reference


def as_tex(rows: Sequence[Mapping[str, str]]) -> str:
    """Return the table as a LaTeX ``tabular`` with the rules of booktabs."""
    import pandas as pd

    columns = "l" + "r" * (len(rows[0]) - 1)
    text = str(pd.DataFrame(rows).to_latex(index=False, escape=True, column_format=columns))
    return text.replace("±", r"$\pm$").replace("Ω", r"$\Omega$").replace("×", r"$\times$").replace("–", "--")
