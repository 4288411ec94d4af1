"""Print and draw the figures that need no model.

    python examples/findings/figures.py reconstruction      # [-o DIRECTORY] [--metric normwise]
    python examples/findings/figures.py decomposition       # [-o DIRECTORY]

Each command takes seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from fp4graph.errors import needs
from fp4graph.lab.pictures.panels import error_panels
from fp4graph.lab.pictures.style import PALETTE, styled, subplots
from fp4graph.lab.statistics.decomposition import RelativeError, decompose, reconstruction_error
from fp4graph.numerics.formats import E2M1, SCALES
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique import parts_of
from fp4graph.technique.registry import default_registry

if TYPE_CHECKING:
    from matplotlib.figure import Figure

app = typer.Typer(add_completion=False, help=__doc__, no_args_is_help=True)
Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the picture.")]
#: The scale formats of the design-space paper, and no rounding of scales.
FORMATS = ("e8m0", "e4m3", "ue5m3", "e8m3", "fp32")
BLOCKS, TENSOR_SCALES = [2**power for power in range(2, 9)], [10.0**power for power in range(-8, 7)]
#: The panels of Figures 11 to 15: the setting of the quantizer that varies, its values, and the other settings.
PANELS: dict[str, tuple[str, Sequence[Any], dict[str, Any]]] = {
    "11: block size, STE": ("block", BLOCKS, {}),
    "12: tensor scale, STE, blocks of 16": ("tensor_scale", TENSOR_SCALES, {}),
    "13: block size, softmax, β = 40": ("block", BLOCKS, {"beta": 40.0}),
    "14: tensor scale, softmax, β = 40": ("tensor_scale", TENSOR_SCALES, {"beta": 40.0}),
    "15: β, blocks of 16": ("beta", (1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0), {}),
}
_LABELS = {"block": "block size", "tensor_scale": "tensor scale", "beta": "β"}
#: The formats with three mantissa bits agree within their ranges; dashing two lines keeps the third visible.
_DASHES: dict[str, Any] = {"ue5m3": (0, (3, 6)), "e8m3": (4.5, (3, 6))}
_FORMULAS = {"elementwise": "mean of |Q(x) − x| / |x|", "normwise": "‖Q(x) − x‖ / ‖x‖"}


def gaussian(lines: int = 512, length: int = 1024, seed: int = 0) -> Tensor:
    return torch.randn(lines, length, generator=torch.Generator().manual_seed(seed))


def e2m1_error(
    x: Tensor, scale: str, *, block: int = 16, tensor_scale: float = 1.0, beta: float | None = None
) -> RelativeError:
    """Return the errors of ``tensor_scale``·x in E2M1, with encode scales Qmax/Z rounded to nearest as in the paper."""
    spec = QuantSpec(E2M1, block, ScaleSpec(SCALES[scale], "nearest_even", "encode"))
    return reconstruction_error(x * tensor_scale, spec, beta)


@app.command()
def reconstruction(
    output: Output = Path(),
    seed: int = 0,
    metric: Annotated[
        Literal["elementwise", "normwise"], typer.Option(help="The paper's |X − X̂| / |X|, or a ratio of norms.")
    ] = "elementwise",
) -> None:
    """Draw and print Figures 11 to 15 of the design-space paper's appendix, on Gaussian data."""
    needs("pandas", "tables need pandas", "analysis")
    import pandas

    x, formula = gaussian(seed=seed), _FORMULAS[metric]
    with styled():
        picture, panels = subplots(9.6, 3, 2)
        for axes, (title, (setting, values, fixed)) in zip(panels.flat, PANELS.items(), strict=False):
            errors = {
                name: [getattr(e2m1_error(x, name, **{setting: value}, **fixed), metric) for value in values]
                for name in FORMATS
            }
            table = pandas.DataFrame({_LABELS[setting]: values, **errors})
            print(f"Figure {title}: {formula}\n{table.to_string(index=False, float_format='{:.4g}'.format)}\n")
            for color, name in zip(PALETTE, FORMATS, strict=False):
                axes.plot(values, errors[name], color=color, linewidth=2, label=name, linestyle=_DASHES.get(name, "-"))
            axes.set_xscale("log", base=2 if setting == "block" else 10)
            axes.set(yscale="log" if setting == "tensor_scale" else "linear", title=title)
            axes.set(xlabel=_LABELS[setting], ylabel=formula)
        panels.flat[-1].set_axis_off()
        panels.flat[-1].legend(*panels.flat[0].get_legend_handles_labels(), title="scale format", loc="center left",
                               handlelength=4.5)  # fmt: skip
    _save(picture, output / "reconstruction.png")


@app.command()
def decomposition(output: Output = Path(), seed: int = 0) -> None:
    """Draw and print the parts of MXFP4's error, with and without macro-block scaling and outlier fallback, on three
    kinds of data: Gaussian, Gaussian with one large element in 100, and Student's t with 3 degrees of freedom."""
    needs("pandas", "tables need pandas", "analysis")
    import pandas

    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(512, 1024, generator=generator)
    outliers = torch.where(torch.rand(512, 1024, generator=generator) < 0.01, 20.0, 1.0)
    chi = torch.randn(3, 512, 1024, generator=generator).square().sum(0)
    data = {"Gaussian": normal, "Gaussian, 1 % × 20": normal * outliers, "Student's t, 3": normal / (chi / 3).sqrt()}
    registered: Any = default_registry().techniques
    macro, fallback = registered["macro_block_scaling"](), registered["outlier_fallback"]()
    recipes: dict[str, tuple[Any, ...]] = {
        "MXFP4": (),
        "+ macro-block scaling": (macro,),
        "+ outlier fallback": (fallback,),
        "+ both": (macro, fallback),
    }
    errors: dict[str, dict[str, Any]] = {name: {} for name in data}
    for name, x in data.items():
        for recipe, techniques in recipes.items():
            shares = decompose(
                x, OperandProgram(QuantSpec(), tuple(p for t in techniques for p in parts_of(t)))
            ).shares(x)
            errors[name][recipe] = {part: 100 * share for part, share in shares.items()}
    table = pandas.concat({name: pandas.DataFrame(bars).T for name, bars in errors.items()})
    table["interaction"] = 2 * table["total"] - table.sum(axis=1)
    print(f"squared error, % of the signal\n{table.to_string(float_format='{:.3f}'.format)}")
    with styled():
        picture, panels = subplots(4.6, 1, len(data), sharey=True, squeeze=False)
        error_panels(picture, panels, errors, "squared error, % of the signal")
    _save(picture, output / "decomposition.png")


def _save(picture: Figure, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, dpi=130)
    print(f"picture: {file}")


if __name__ == "__main__":
    app()
