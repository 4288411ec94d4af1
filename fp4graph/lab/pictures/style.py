"""The look of pictures: one set of colours and names for operands, error terms and kinds of sites."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4graph.errors import needs
from fp4graph.technique.operands import Operand

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Six colours that colour-blind readers can tell apart (Okabe and Ito 2008), then a purple and a grey.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8c6bb1", "#5a5a5a")
#: Names of the operands with TetraJet's numbers.
LABELS = {str(operand): f"Q{number} {operand}" for number, operand in enumerate(Operand, 1)}
COLORS = dict(zip(LABELS.values(), PALETTE, strict=False))
#: Parts of an error with their names and colours.
TERMS = {
    "grid_noise": ("grid noise", PALETTE[5]),
    "scale_bias": ("scale bias", PALETTE[4]),
    "dead_zone": ("dead zone", PALETTE[1]),
}
#: The width of a picture as wide as the page, in inches.
WIDTH = 8.8


def subplots(height: float, *shape: int, width: float = WIDTH, **options: Any) -> tuple[Figure, Any]:
    """Return a figure, sized in inches, and its axes in rows and columns. Call it inside :func:`styled`."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height))
    return picture, picture.subplots(*shape, **options)


@contextmanager
def styled() -> Iterator[None]:
    """Apply the pictures' style to figures made in this context, or in the decorated function."""
    needs("matplotlib", "pictures are drawn with matplotlib", "analysis")
    from matplotlib import style

    with style.context(Path(__file__).with_name("page.mplstyle")):
        yield


def plain(name: str) -> str:
    """Return the name of a module, policy or metric as a text of a picture.

    matplotlib would read two dollar signs as mathematics, and leave a name that begins with _ out of a legend.
    """
    return f"{' ' * name.startswith('_')}{name}".replace("$", r"\$")


def svg(picture: Figure, name: str) -> str:
    """Return the figure as an ``<svg>`` element; ``name`` makes its ids unique on a page."""
    import matplotlib as mpl

    buffer = io.StringIO()
    metadata: dict[str, Any] = {"Date": None, "Creator": None, "Format": None, "Type": None}
    with mpl.rc_context({"svg.hashsalt": name}):
        picture.savefig(buffer, format="svg", metadata=metadata, transparent=True)
    return "<svg" + buffer.getvalue().partition("<svg")[2]
