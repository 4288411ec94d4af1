"""Commands that print and draw the figures that need no model.

python -m fp4graph.lab.pictures.figures reconstruction [-o DIRECTORY] [--metric normwise]
python -m fp4graph.lab.pictures.figures formats [-o DIRECTORY]
python -m fp4graph.lab.pictures.figures decomposition [-o DIRECTORY]
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Column, Table

from fp4graph.lab.pictures.panels import error_panels
from fp4graph.lab.pictures.style import PALETTE, TERMS, styled, subplots
from fp4graph.lab.statistics import reconstruction as r
from fp4graph.lab.statistics.decomposition import decompose
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique.registry import default_registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)
console = Console(highlight=False, width=120)
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the picture.")]
#: The panels of Figures 11 to 15: the setting of the quantizer that varies, its values, and the other settings.
PANELS: dict[str, tuple[str, Sequence[Any], dict[str, Any]]] = {
    "11: block size, STE": ("block", r.BLOCKS, {}),
    "12: tensor scale, STE, blocks of 16": ("tensor_scale", r.TENSOR_SCALES, {}),
    "13: block size, softmax, β = 40": ("block", r.BLOCKS, {"beta": 40.0}),
    "14: tensor scale, softmax, β = 40": ("tensor_scale", r.TENSOR_SCALES, {"beta": 40.0}),
    "15: β, blocks of 16": ("beta", r.BETAS, {}),
}
_LABELS = {"block": "block size", "tensor_scale": "tensor scale", "beta": "β"}
#: The formats with three mantissa bits agree within their ranges: two dashed lines leave the third line visible.
_DASHES: dict[str, Any] = {"ue5m3": (0, (3, 6)), "e8m3": (4.5, (3, 6))}


class Metric(StrEnum):
    """A relative error, a field of :class:`fp4graph.lab.statistics.reconstruction.RelativeError`."""

    elementwise = "elementwise"
    normwise = "normwise"


_FORMULAS = {Metric.elementwise: "mean of |Q(x) − x| / |x|", Metric.normwise: "‖Q(x) − x‖ / ‖x‖"}


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
    formula = _FORMULAS[metric]
    with styled():
        picture, every = subplots(9.6, 3, 2)
        for axes, (title, (setting, values, others)) in zip(every.flat, PANELS.items(), strict=False):
            table = Table(title=f"Figure {title}: {formula}", title_justify="left")
            curves = {
                name: [getattr(r.e2m1_error(x, name, **{setting: value}, **others), metric) for value in values]
                for name in r.FORMATS
            }
            for column in (_LABELS[setting], *curves):
                table.add_column(column, justify="right")
            for value, *errors in zip(values, *curves.values(), strict=True):
                table.add_row(f"{value:g}", *(f"{error:.4g}" for error in errors))
            console.print(table)
            for color, (name, errors) in zip(PALETTE, curves.items(), strict=False):
                axes.plot(values, errors, color=color, linewidth=2, label=name, linestyle=_DASHES.get(name, "-"))
            axes.set_xscale("log", base=2 if setting == "block" else 10)
            axes.set(yscale="log" if setting == "tensor_scale" else "linear", title=title)
            axes.set(xlabel=_LABELS[setting], ylabel=formula)
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
        picture, (above, below) = subplots(6.8, 2, 3, width=12.0)
        for place, (color, (name, *curves)) in enumerate(zip(PALETTE, r.relaxations(u), strict=False)):
            for axes, curve in zip(above, curves, strict=True):
                axes.plot(u, curve, color=color, label=name, linewidth=1.3, zorder=2 + (place == 1))
        above[0].set(xlabel="u = x/S", ylabel="value", title="1a: Q(u) and its stand-ins")
        above[1].set(xlabel="u = x/S", ylabel="slope", title="1b: their slopes", ylim=(-0.15, 4))
        above[2].set(xlabel="u = x/S", ylabel="slope", title="1c: clipped slopes", ylim=(-0.15, 4))
        for color, name in zip(PALETTE, ("e8m0", "e4m3", "ue5m3"), strict=False):
            quantized = r.quantized_scales(name, scale)
            for axes, curve in zip(below, (quantized, scale / quantized, scale / quantized), strict=True):
                axes.plot(scale, curve, color=color, label=name)
            deviation = (scale / quantized).log2().abs()
            inside = (scale > 2.0**-9) & (scale < 448)
            console.print(
                f"{name}: abs(log2(s/s_q)) is {deviation[inside].mean():.4f} on average and at most "
                f"{deviation[inside].max():.3f} between 2^-9 and 448, {deviation.max():.2f} between 1e-6 and 1e4"
            )
        below[0].set(xscale="log", yscale="log", xlabel="scale s", ylabel="s_q", title="2a: quantized scales s_q")
        below[1].set(xscale="log", yscale="log", xlabel="scale s", ylabel="s / s_q (log scale)",
                     title="2b: relative deviation")  # fmt: skip
        below[2].set(xscale="log", xlabel="scale s", ylabel="s / s_q", xlim=(1e-3, 0.1), ylim=(0.4, 1.6),
                     title="2b where the values of e4m3 begin")  # fmt: skip
        for axes in below[1:]:
            axes.axhline(1, color="#999", linewidth=0.8)
        for axes in (above[0], below[0]):
            axes.legend()
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
    numbers = ("scale bias", "dead zone", "grid noise", "interaction", "total")
    table = Table("data", "recipe", *(Column(number, justify="right") for number in numbers),
                  title="squared error, % of the signal", title_justify="left")  # fmt: skip
    errors: dict[str, dict[str, dict[str, float]]] = {name: {} for name in data}
    for name, x in data.items():
        for recipe, techniques in recipes.items():
            shares = errors[name][recipe] = {
                part: 100 * share for part, share in decompose(x, OperandProgram(spec, techniques)).shares(x).items()
            }
            terms = [shares[term] for term in ("scale_bias", "dead_zone", "grid_noise")]
            rest = shares["total"] - sum(shares[term] for term in TERMS)
            table.add_row(name, recipe, *(f"{value:.3f}" for value in (*terms, rest, shares["total"])))
    console.print(table)
    with styled():
        picture, panels = subplots(4.6, 1, len(data), sharey=True, squeeze=False)
        error_panels(picture, panels, errors, "squared error, % of the signal")
    _save(picture, output / "decomposition.png")


def _save(picture: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, dpi=130)
    console.print(f"picture: {file}")


if __name__ == "__main__":
    app()
