"""Writes docs/targets.md: which GEMMs of each shipped policy hardware and libraries run natively.

python -m fp4graph.commands.targets docs/targets.md
"""

from __future__ import annotations

from pathlib import Path

import typer

from fp4graph.commands.catalogue import Native, loadable_policies, native_on, shipped_registry
from fp4graph.files import write
from fp4graph.graph.targets import MSLK, data
from fp4graph.policy import Policy

HEAD = """# Where policies run natively

fp4graph simulates; this page says what hardware would multiply in FP4 or FP8 by itself. A GEMM is native on a target if
both operands are in formats that the target multiplies. Hardware leaves the rounding before a product to software; a
library has only the roundings and techniques of its recipes.

```sh
fp4graph check nvfp4-te --target b200                                    # each GEMM of a policy, with the reason
fp4graph explain nvfp4-te --model deit_tiny_patch16_224 --target te      # each layer, with its sizes
```

In Python `fp4graph.explain(model, policy, args).on("b200")` returns the same table. The last line is the share of the
training FLOPs of matrix products that is native; it also counts products that are not quantized, which the table leaves
out. The data is `fp4graph/graph/targets.yaml`, read from sources, not measured. `python -m fp4graph.commands.targets
docs/targets.md` generates this page.
"""
MSLK_NOTE = """
"torch with MSLK": only if torch was built with that library. `torch.__config__.show()` then names `USE_MSLK`, as in the
wheel of torch 2.14.1 for CUDA 13.0."""
LEGEND = """
**yes**: all three GEMMs of a linear layer of suitable size are native. A name: only that GEMM is. Empty: no GEMM is.
"exact": the policy keeps the GEMM in high precision. "at first": a later phase differs. "experts": the GEMMs of routed
experts, if a rule is for experts alone. `check --target` says why, and shows experts and phases.
"""


def page() -> str:
    known = data()
    lines = [HEAD, "## Targets\n"]
    lines += ["| target | | multiplies | experts | sizes are multiples of |", "| --- | --- | --- | --- | --- |"]
    for name, target in known.targets.items():
        special = (target.products, target.mslk.products), (target.grouped, target.mslk.grouped)
        products = (", ".join(_pair(pair, mslk) for pair in pairs) or "none" for pairs, mslk in special)
        sizes = target.multiples
        cells = name, target.title, *products, f"{sizes.contraction} (contracted), {sizes.result} (result)"
        lines.append(f"| `{cells[0]}` | {' | '.join(cells[1:])} |")
    lines += [
        MSLK_NOTE,
        "\n## Formats\n",
        "| format | element | block | scale | tensor scale |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {f.element.upper()} | {f.block} | {f.scale.upper()} | {'yes' if f.levels == 2 else 'no'} |"
        for name, f in known.formats.items()
    ]
    lines += [
        "\n## Policies",
        LEGEND,
        f"| policy | {' | '.join(known.targets)} |",
        "| --- |" + " --- |" * len(known.targets),
    ]
    for name, policy in loadable_policies(shipped_registry()).items():
        if policy.quantizes:
            found = [_in_phases(each, policy) for each in known.targets]
            lines.append(f"| `{name}` | {' | '.join(found)} |")
    lines += ["\n## Sources\n", *(f"- {name}: {text.strip()}" for name, text in known.sources.items())]
    used = {each: [name for name, target in known.targets.items() if each in target.sources] for each in known.sources}
    lines += ["", "; ".join(f"{each}: {', '.join(names)}" for each, names in used.items()) + "."]
    return "\n".join(lines) + "\n"


def _pair(pair: tuple[str, str], mslk: tuple[str, ...]) -> str:
    return (pair[0] if pair[0] == pair[1] else " x ".join(pair)) + MSLK * (pair[0] in mslk)


def _in_phases(target: str, policy: Policy) -> str:
    """Return a policy's cell: linear layers, and experts if a rule is for them alone; "at first" if a phase differs."""
    apart = any(rule.quantizes and rule.match.op == ("grouped",) for rule in policy.rules)

    def cell(phase: Policy) -> str:
        rows = native_on(target, phase)
        linears, experts = (_cell([row for row in rows if row.op == op]) for op in ("linear", "grouped"))
        return "; ".join(filter(None, [linears, f"experts: {experts or 'none'}"])) if apart else linears

    first = cell(policy)
    return f"{first} at first" if first and any(cell(p.policy) != first for p in policy.phases) else first


def _cell(rows: list[Native]) -> str:
    """Return the GEMMs that are native under every rule."""
    kinds = {row.gemm: {each.kind for each in rows if each.gemm == row.gemm} for row in rows}
    native = [gemm for gemm, found in kinds.items() if "native" in found and "simulated" not in found]
    exact = [gemm for gemm, found in kinds.items() if found == {"exact"}]
    if native and len(native) + len(exact) == len(kinds):
        return "yes" if not exact else f"{', '.join(native)}; {', '.join(exact)} exact"
    return ", ".join(native)


def main(file: Path) -> None:
    """Write the page to FILE."""
    write(file, page())


if __name__ == "__main__":
    typer.run(main)
