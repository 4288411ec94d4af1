"""Commands that print and draw the figures that need no model.

python -m fp4graph.analysis.figures reconstruction [-o DIRECTORY] [--metric normwise]
python -m fp4graph.analysis.figures formats [-o DIRECTORY]
python -m fp4graph.analysis.figures decomposition [-o DIRECTORY]
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from fp4graph.analysis import reconstruction as r
from fp4graph.analysis.decomposition import decompose
from fp4graph.analysis.panels import error_bars
from fp4graph.analysis.style import PALETTE, TERMS, figure, styled
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique.registry import default_registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)
console = Console(highlight=False, width=120)
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the picture.")]
Points = Sequence[r.Point]
#: The formats with three mantissa bits agree within their ranges: two dashed lines leave the third line visible.
_DASHES: dict[str, Any] = {"ue5m3": (0, (3, 6)), "e8m3": (4.5, (3, 6))}
#: Names of the fields of a point that figures are drawn over.
_AXES = {"block": "block size", "tensor_scale": "tensor scale", "beta": "β"}


class Metric(StrEnum):
    """A relative error of :class:`fp4graph.analysis.reconstruction.Point`."""

    elementwise = "elementwise"
    normwise = "normwise"

    @property
    def formula(self) -> str:
        """The formula in a figure's title."""
        return "mean of |Q(x) − x| / |x|" if self is Metric.elementwise else "‖Q(x) − x‖ / ‖x‖"


@app.command()
def reconstruction(
    output: Output = Path(),
    seed: int = 0,
    metric: Annotated[
        Metric, typer.Option(help="elementwise, the paper's |X − X̂| / |X|, or normwise, a ratio of norms.")
    ] = Metric.elementwise,
) -> None:
    """Figures 11 to 15 of the design-space paper's appendix, on Gaussian data, and their numbers."""
    x = r.gaussian(seed=seed)
    panels: dict[str, tuple[str, Points]] = {
        "11: block size, STE": ("block", r.by_block(x)),
        "12: tensor scale, STE, blocks of 16": ("tensor_scale", r.by_tensor_scale(x)),
        "13: block size, softmax, β = 40": ("block", r.by_block(x, 40.0)),
        "14: tensor scale, softmax, β = 40": ("tensor_scale", r.by_tensor_scale(x, 40.0)),
        "15: β, blocks of 16": ("beta", r.by_beta(x)),
    }
    for title, (field, points) in panels.items():
        console.print(_table(f"Figure {title}: {metric.formula}", field, points, metric))
    with styled():
        picture = figure(9.6)
        every = picture.subplots(3, 2)
        for axes, (title, (field, points)) in zip(every.flat, panels.items(), strict=False):
            for color, name in zip(PALETTE, r.FORMATS, strict=False):
                own = [point for point in points if point.scale == name]
                axes.plot(
                    [getattr(p, field) for p in own], [getattr(p, metric) for p in own], color=color, linewidth=2,
                    label=name, linestyle=_DASHES.get(name, "-"),
                )  # fmt: skip
            axes.set_xscale("log", base=2 if field == "block" else 10)
            axes.set(yscale="log" if field == "tensor_scale" else "linear", title=title)
            axes.set(xlabel=_AXES[field], ylabel=metric.formula)
        every.flat[-1].set_axis_off()
        every.flat[-1].legend(*every.flat[0].get_legend_handles_labels(), title="scale format", loc="center left",
                              handlelength=4.5)  # fmt: skip
    _save(picture, output / "reconstruction.png")


@app.command()
def formats(output: Output = Path()) -> None:
    """Figures 1 and 2 of the design-space paper: stand-ins for rounding, and what scale formats do to scales."""
    u = torch.linspace(0, 6, 2401)
    scale = torch.logspace(-6, 4, 4001)
    with styled():
        picture = figure(6.8, 12.0)
        every = picture.subplots(2, 3)
        for place, (color, (name, *curves)) in enumerate(zip(PALETTE, r.relaxations(u), strict=False)):
            for axes, curve in zip(every[0], curves, strict=True):
                axes.plot(u, curve, color=color, label=name, linewidth=1.3, zorder=2 + (place == 1))
        every[0][0].set(xlabel="u = x/S", ylabel="value", title="1a: Q(u) and its stand-ins")
        every[0][1].set(xlabel="u = x/S", ylabel="slope", title="1b: their slopes", ylim=(-0.15, 4))
        every[0][2].set(xlabel="u = x/S", ylabel="slope", title="1c: clipped slopes", ylim=(-0.15, 4))
        every[0][0].legend()
        for color, name in zip(PALETTE, ("e8m0", "e4m3", "ue5m3"), strict=False):
            quantized = r.quantized_scales(name, scale)
            every[1][0].plot(scale, quantized, color=color, label=name)
            for axes in every[1][1:]:
                axes.plot(scale, scale / quantized, color=color, label=name)
            deviation = (scale / quantized).log2().abs()
            inside = (scale > 2.0**-9) & (scale < 448)
            console.print(
                f"{name}: abs(log2(s/s_q)) is {deviation[inside].mean():.4f} on average and at most "
                f"{deviation[inside].max():.3f} between 2^-9 and 448, {deviation.max():.2f} between 1e-6 and 1e4"
            )
        every[1][0].set(xscale="log", yscale="log", xlabel="scale s", ylabel="s_q", title="2a: quantized scales s_q")
        every[1][1].set(xscale="log", yscale="log", xlabel="scale s", ylabel="s / s_q (log scale)",
                        title="2b: relative deviation")  # fmt: skip
        every[1][2].set(xscale="log", xlabel="scale s", ylabel="s / s_q", xlim=(1e-3, 0.1), ylim=(0.4, 1.6),
                        title="2b where the values of e4m3 begin")  # fmt: skip
        for axes in every[1][1:]:
            axes.axhline(1, color="#999", linewidth=0.8)
        every[1][0].legend()
    _save(picture, output / "formats.png")


@app.command()
def decomposition(output: Output = Path(), seed: int = 0) -> None:
    """The three parts of MXFP4's error with and without macro-block scaling and outlier fallback, on three kinds of
    data: Gaussian, Gaussian with one large element in 100, Student's t with 3 degrees of freedom."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(512, 1024, generator=generator)
    outliers = torch.where(torch.rand(512, 1024, generator=generator) < 0.01, 20.0, 1.0)
    chi = torch.randn(3, 512, 1024, generator=generator).square().sum(0)
    data = {"Gaussian": normal, "Gaussian, 1 % × 20": normal * outliers, "Student's t, 3": normal / (chi / 3).sqrt()}
    spec = QuantSpec()  # E2M1 in blocks of 32 with the scales of the OCP specification
    found: Any = default_registry().techniques
    macro, fallback = found["macro_block_scaling"](), found["outlier_fallback"]()
    recipes = {
        "MXFP4": (),
        "+ macro-block scaling": (macro,),
        "+ outlier fallback": (fallback,),
        "+ both": (macro, fallback),
    }
    table = Table(title="squared error, % of the signal", title_justify="left")
    for column in ("data", "recipe", "scale bias", "dead zone", "grid noise", "interaction", "total"):
        table.add_column(column, justify="left" if column in ("data", "recipe") else "right")
    with styled():
        picture = figure(4.6)
        panels = picture.subplots(1, len(data), sharey=True)
        for axes, (name, x) in zip(panels, data.items(), strict=True):
            errors = {}
            for recipe, techniques in recipes.items():
                parts = decompose(x, OperandProgram(spec, techniques))
                signal = x.double().square().sum()
                shares = {term: 100 * float(getattr(parts, term).square().sum() / signal) for term in (*TERMS, "total")}
                errors[recipe] = shares
                terms = [shares[term] for term in ("scale_bias", "dead_zone", "grid_noise")]
                rest = shares["total"] - sum(shares[term] for term in TERMS)
                table.add_row(name, recipe, *(f"{value:.3f}" for value in (*terms, rest, shares["total"])))
            error_bars(axes, errors)
            axes.set_title(name)
            axes.set_xlabel("squared error, % of the signal")
        panels[0].invert_yaxis()
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    console.print(table)
    _save(picture, output / "decomposition.png")


def _table(title: str, field: str, points: Points, metric: Metric) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(_AXES[field], justify="right")
    for name in r.FORMATS:
        table.add_column(name, justify="right")
    values = {(getattr(point, field), point.scale): getattr(point, metric) for point in points}
    for place in dict.fromkeys(place for place, _ in values):
        table.add_row(f"{place:g}", *(f"{values[place, name]:.4g}" for name in r.FORMATS))
    return table


def _save(picture: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, dpi=130)
    console.print(f"picture: {file}")


if __name__ == "__main__":
    app()
