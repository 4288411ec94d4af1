"""Writes docs/schedules.md: the code that quantizes each operand of a ViT and of a Qwen3-MoE under five policies.

    python -m fp4graph.commands.schedules docs/schedules.md

The machine must be able to build the CPU kernels. Nothing is trained: the schedules are those of captured graphs.
"""

from __future__ import annotations

from pathlib import Path

import typer

import fp4graph
from fp4graph.commands.models import named_model
from fp4graph.files import write

POLICIES = ("tetrajet", "nvfp4-te", "tetrajet-qema", "mxfp4-rl", "quartet-ii")
QWEN = (
    "hf:Qwen3MoeConfig(hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=8, "
    "num_attention_heads=4, num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, vocab_size=1000)"
)
MODELS = {"a ViT": "vit_tiny_patch16_224", "a Qwen3-MoE": QWEN}
HEAD = """# Schedules

`fp4graph explain POLICY --model MODEL --schedule` prints which code quantizes each operand on your machine,
why if this is not a single kernel, and in which form the forward keeps the operand for the backward.
[Kernels](kernels.md) describes the code; all of it gives the same bits.

The tables show five policies and two models on a CPU with kernels; layers with equal schedules share their lines.
`python -m fp4graph.commands.schedules docs/schedules.md` generates this page.
"""


def page() -> str:
    sections = [HEAD]
    for policy in POLICIES:
        sections.append(f"## {policy}\n")
        for title, model in MODELS.items():
            sections += [f"{title[0].upper()}{title[1:]}:\n", _table(policy, model)]
    return "\n".join(sections)


def _table(policy: str, model: str) -> str:
    named = named_model(model, device="meta")
    sites = fp4graph.explain(named.model, policy, named.args, named.kwargs).sites
    modules: dict[tuple[tuple[str, str, str, str], ...], list[str]] = {}
    for site in sites:
        if site.schedule is not None:
            rows = tuple((line.what, line.by, line.why, ", ".join(line.keeps)) for line in site.schedule.lines())
            leaf = (site.module or "").rpartition(".")[2]
            names = modules.setdefault(rows, [])
            names += [leaf] if leaf not in names else []
    lines = ["| layers | operand | by | because | kept |", "| --- | --- | --- | --- | --- |"]
    for rows, names in modules.items():
        shown = [", ".join(names), *[""] * (len(rows) - 1)]
        lines += [f"| {name} | {' | '.join(row)} |".replace("  ", " ") for name, row in zip(shown, rows, strict=True)]
    return "\n".join(lines) + "\n"


def main(file: Path) -> None:
    """Write the page to FILE."""
    write(file, page())


if __name__ == "__main__":
    typer.run(main)
