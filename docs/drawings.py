"""The drawings of docs/concepts.md, with names from the code; ``python docs/drawings.py`` writes docs/images."""

from __future__ import annotations

from html import escape
from pathlib import Path

import fp4graph
from fp4graph.numerics.words import describe
from fp4graph.technique.parts import KINDS

WIDTH, LINE, PAD, GAP = 470, 19, 10, 22
#: Where each kind of part acts.
PLACES = {
    "PairTransform": "on both operands of a GEMM, so that it cancels",
    "Wrapper": "around one operand's quantizer",
    "BlockScale": "on what blocks are divided by",
    "Rounding": "on the values of elements",
    "Gradient": "on the derivative, in the backward",
    "ChannelSplit": "on which input channels are multiplied apart",
    "OptimizerHook": "around optimizer.step()",
}


def drawing(boxes: list[tuple[str, list[str]]], *, arrows: bool) -> str:
    """Return an SVG of ``boxes`` from top to bottom, each a title and lines of text."""
    y, shapes = PAD, []
    for index, (title, lines) in enumerate(boxes):
        height = LINE * (1 + len(lines)) + PAD
        if arrows and index:
            shapes.append(f'<path d="M{WIDTH / 2} {y - GAP}v{GAP - 3}m-4 -6l4 6l4 -6" fill="none" stroke="#444"/>')
        place = f'x="{PAD}" y="{y}" width="{WIDTH - 2 * PAD}" height="{height}"'
        shapes.append(f'<rect {place} rx="5" fill="#eef1fb" stroke="#4051b5"/>')
        for row, text in enumerate((title, *lines)):
            style = ' font-weight="bold"' if row == 0 else ""
            shapes.append(f'<text x="{2 * PAD}" y="{y + LINE * (row + 1)}"{style}>{escape(text)}</text>')
        y += height + GAP
    size = f'viewBox="0 0 {WIDTH} {y - GAP + PAD}" width="{WIDTH}"'
    body = "\n".join(['<rect width="100%" height="100%" fill="white"/>', *shapes])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="14">\n{body}\n</svg>\n'


def path_of_a_product() -> str:
    """Draw how a product of a model becomes kernels, under the policy ``tetrajet``."""
    (rule,) = (rule for rule in fp4graph.load_policy("tetrajet").rules if rule.quantizes)
    operands = [f"{operand}: {describe(spec)}" for operand, spec in rule.specs.items() if spec is not None]
    return drawing(
        [
            ("model", ["your nn.Module; fp4graph.apply(model, policy) keeps names"]),
            ("graph", ["what torch.compile captures of a call"]),
            ("sites", ["each matrix product: blocks.0.mlp.fc1, op linear"]),
            ("rules", [f"the first that matches decides: {rule.name!r}"]),
            ("six operands of three GEMMs", operands),
            (
                "schedule",
                ["for each operand a kernel, and what is kept for", "the backward; every kernel gives the same bits"],
            ),
            ("kernels", ["C++ on a CPU, Triton on a GPU, else tensor code"]),
        ],
        arrows=True,
    )


def parts_of_a_technique() -> str:
    """Draw the kinds of parts with their methods."""
    boxes = []
    for kind in KINDS:
        stages = [stage for stage in kind.stages if stage != "observe"]
        rows = [", ".join(stages[start : start + 3]) for start in range(0, len(stages), 3)]
        boxes.append((f"{kind.__name__}: {PLACES[kind.__name__]}", rows))
    return drawing(boxes, arrows=False)


#: The drawings by the names of their files.
DRAWINGS = {"concepts.svg": path_of_a_product, "parts.svg": parts_of_a_technique}

if __name__ == "__main__":
    for name, draw in DRAWINGS.items():
        Path(__file__).with_name("images").joinpath(name).write_text(draw(), encoding="utf-8")
