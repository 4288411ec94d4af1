"""Sums the forward FLOPs of sites, and joins the sites of repeated blocks into the lines of a table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from fp4graph.graph.site import Site
from fp4graph.kernels.devices import GPU
from fp4graph.policy import DEFAULT_INDEX
from fp4graph.technique.operands import Gemm, Operand

_NUMBER = re.compile(r"(?<![^._])\d+(?![^._])")
_GROUPS = {
    "conv": "convolutions",
    "recurrent": "recurrent layers",
    "sdpa": "attention",
    "matmul": "products of activations",
}


def totals(sites: Iterable[Site]) -> dict[str, dict[str, int]]:
    """Sum the known forward FLOPs by :attr:`Site.standing` and then by :func:`group`, the largest group first."""
    sums: dict[str, Counter[str]] = {standing: Counter() for standing in ("quantized", "kept", "not supported")}
    for site in sites:
        sums[site.standing][group(site)] += site.flops or 0
    return {standing: dict(groups.most_common()) for standing, groups in sums.items()}


def group(site: Site) -> str:
    """Return the words under which the FLOPs of ``site`` are summed.

    This is the name of the rule that decided the site. Without a rule, or if only the default keeps the site, it is the
    kind of operation, or for a linear layer the name of its module without the path.
    """
    if site.rule is not None and (site.quantized or (site.rule_index or 0) != DEFAULT_INDEX):
        return site.rule
    if site.op in _GROUPS or site.op != "linear":
        return _GROUPS.get(site.op, site.op)
    leaves = [part for part in (site.module or "").split(".") if not part.isdigit()]
    return leaves[-1] if leaves and leaves[-1] else "linear"


def summary(sites: Sequence[Site]) -> str:
    """Return the last line of an explanation, such as "quantized: 87 % of forward matmul FLOPs; kept: 13 % (head)"."""
    sums = totals(sites)
    known = sum(sum(groups.values()) for groups in sums.values())
    unknown = sum(site.flops is None for site in sites)
    text = f"quantized: {percent(sum(sums['quantized'].values()), known)} of forward matmul FLOPs"
    for standing in ("kept", "not supported"):
        if groups := {name: work for name, work in sums[standing].items() if work}:
            shown = ", ".join([*list(groups)[:4], *(["..."] if len(groups) > 4 else [])])
            text += f"; {standing}: {percent(sum(groups.values()), known)} ({shown})"
    return text + (f"; sites of unknown FLOPs: {unknown}" if unknown else "")


def on_gpu(sites: Sequence[Site]) -> list[str]:
    """Return sentences about GPUs: which products are exact, and which operands no kernel quantizes."""
    lines = []
    if gemms := [
        (site, gemm) for site in sites for gemm in Gemm if any(site.operands[o] for o in Operand if o.gemm is gemm)
    ]:
        exact = sum(gemm in site.exact for site, gemm in gemms)
        lines.append(
            f"on a GPU: {exact} of {len(gemms)} quantized GEMMs have operands that are exact in bf16; in an fp32 model "
            "these GEMMs run as bf16 products with fp32 output"
        )
    without: dict[str, Counter[Operand]] = {}
    for site in sites:
        for operand, spec in site.operands.items():
            if spec is not None and (what := GPU.unknown(spec)) is not None:
                without.setdefault(what, Counter())[operand] += 1
    for what, operands in without.items():
        names = " ".join(f"Q{number}" for number, operand in enumerate(Operand, 1) if operand in operands)
        lines.append(
            f"on a GPU: no kernel knows {what}, so tensor code quantizes {names} ({operands.total()} operands), and "
            "reads and writes more than a kernel"
        )
    return lines


def techniques(sites: Iterable[Site]) -> list[str]:
    """Return the techniques that act at the sites of each rule, in words."""
    rules = dict.fromkeys((site.rule, site.techniques) for site in sites if site.techniques)
    return [f"techniques of {rule}: {', '.join(names)}" for rule, names in rules]


def shared(groups: Iterable[Sequence[str]]) -> list[str]:
    """Return a list with a sentence about the weights that share a tensor scale, empty without such weights."""
    names = (", ".join(name.removesuffix(".weight").rpartition(".")[2] for name in group) for group in groups)
    kinds = [f"{kind} (in {count} modules)" for kind, count in Counter(names).items()]
    return [f"siblings with one tensor scale: {'; '.join(kinds)}"] if kinds else []


def percent(part: int, whole: int) -> str:
    """Return ``part`` of ``whole`` in per cent; "0 %" and "100 %" stand only for exact values."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 1:
        return "<1 %"
    return ">99 %" if 99 < share < 100 else f"{share:.0f} %"


def folded(sites: Sequence[Site], *, schedules: bool = False) -> list[tuple[str, tuple[Site, ...]]]:
    """Join sites whose modules' names differ only in numbers.

    Returns names such as ``model.layers.0-31.self_attn.q_proj``, each with its sites, in the order of the first sites.
    The sites of one line agree in operation, shapes, FLOPs, rule, and operands or reason; with ``schedules`` also in
    the code that computes them.
    """
    alike: dict[object, dict[tuple[str, ...], Site]] = {}
    for site in sites:
        numbers = tuple(_NUMBER.findall(site.module or ""))
        shown = (*_shown(site), site.schedule if schedules else None)
        number = 0  # counts equal sites of one module
        while numbers in alike.setdefault((number, *shown), {}):
            number += 1
        alike[(number, *shown)][numbers] = site
    lines: list[tuple[str, tuple[Site, ...]]] = []
    for members in alike.values():
        for ranges in _products(list(members)):
            module = next(iter(members.values())).module
            each = iter(ranges)
            name = "-" if module is None else _NUMBER.sub(lambda _, each=each: _range(next(each)), module)  # type: ignore[misc]
            inside = (s for n, s in members.items() if all(i in r for i, r in zip(n, ranges, strict=True)))
            lines.append((name or "(root)", tuple(inside)))
    places = {id(site): place for place, site in enumerate(sites)}
    return sorted(lines, key=lambda line: places[id(line[1][0])])


def _shown(site: Site) -> tuple[object, ...]:
    """Return all that a line shows of ``site``, with stars for the numbers in its module's name."""
    pattern = None if site.module is None else _NUMBER.sub("*", site.module)
    decided = site.rule, site.rule_index, site.reason, tuple(site.operands.items()), site.quantized
    apart = site.apart_channels, tuple(site.apart.items())
    return (pattern, site.op, site.shapes, site.flops, site.supported, *decided, *apart)


def _products(keys: list[tuple[str, ...]]) -> list[tuple[tuple[str, ...], ...]]:
    """Write ``keys``, which have equally many items, as disjoint products of sets."""
    rows: list[tuple[tuple[str, ...], ...]] = [tuple((item,) for item in key) for key in keys]
    for place in reversed(range(len(keys[0]))):
        merged: dict[tuple[tuple[str, ...], ...], list[str]] = {}
        for row in rows:
            merged.setdefault((*row[:place], *row[place + 1 :]), []).extend(row[place])
        rows = [(*fixed[:place], tuple(items), *fixed[place:]) for fixed, items in merged.items()]
    return rows


def _range(numbers: Iterable[str]) -> str:
    """Write numbers as ranges: ``0-3,5``."""
    runs: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
