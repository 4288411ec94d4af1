"""Says which GEMMs of a policy hardware or a library runs natively, and why the others are simulated.

The data and its sources are in ``targets.yaml``. A GEMM is native on a target if both operands are in formats that the
target multiplies: element, blocks along the contraction axis, scale format, and one or two levels of scales. Rounding
happens before the product, so every rounding is allowed unless the target's entry restricts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import torch
import yaml
from packaging.version import Version
from pydantic import BaseModel, ConfigDict

from fp4graph.errors import Error, suggest
from fp4graph.graph.site import Site
from fp4graph.numerics.spec import QuantSpec
from fp4graph.ops.gemm import GemmProgram, MatmulProgram
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique import TENSOR_STAGES, Part
from fp4graph.technique.operands import Gemm, Operand

#: The note after formats that torch multiplies only if it was built with MSLK.
MSLK = " (torch with MSLK)"
_OPS = {"conv": "convolution", "sdpa": "attention", "matmul": "product of two activations"}
#: The stages at which a technique takes an operand off the grid of its format, with what it does there.
_OFF_GRID = {"split": "splits", "around": "wraps the quantizer of", "after": "changes"}


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Format(_Entry):
    """An operand that a target multiplies; ``levels`` 2 allows a tensor scale above the scales of blocks."""

    element: str
    block: int | str
    scale: str
    levels: int


class Multiples(_Entry):
    """The numbers that must divide the contraction axis, the features of the result, and its tokens."""

    contraction: int
    result: int
    tokens: int = 1


class Mslk(_Entry):
    """The formats that torch multiplies only if it was built with MSLK: in linear layers, and of experts."""

    products: tuple[str, ...] = ()
    grouped: tuple[str, ...] = ()


class Target(_Entry):
    """A library, or a kind of hardware as torch uses it; ``targets.yaml`` explains the keys."""

    title: str
    sources: tuple[str, ...]
    products: tuple[tuple[str, str], ...]
    grouped: tuple[tuple[str, str], ...]
    multiples: Multiples
    mslk: Mslk = Mslk()
    torch: str | None = None
    gemms: tuple[Gemm, ...] = tuple(Gemm)
    stochastic: tuple[Operand, ...] = tuple(Operand)
    square: tuple[Operand, ...] = tuple(Operand)
    rows: tuple[Operand, ...] = ()
    techniques: Mapping[str, Mapping[str, tuple[Any, ...]]] | None = None
    exclusive: tuple[tuple[str, str], ...] = ()
    scales: Mapping[str, tuple[str, ...]] = {}
    ties: tuple[str, ...] = ("even", "up", "away")
    rounds: tuple[Operand, ...] = tuple(Operand)


class Data(_Entry):
    """The content of ``targets.yaml``."""

    sources: Mapping[str, str]
    formats: Mapping[str, Format]
    targets: Mapping[str, Target]


class Verdict(NamedTuple):
    """Whether a GEMM is ``native``, ``simulated``, or ``exact`` (both operands in high precision), and why: the formats
    of a native GEMM, the obstacle of a simulated GEMM."""

    kind: str
    why: str


@cache
def data() -> Data:
    """Return the content of ``targets.yaml``."""
    return Data.model_validate(
        yaml.safe_load(resources.files("fp4graph.graph").joinpath("targets.yaml").read_text("utf-8"))
    )


def target(name: str) -> Target:
    """Return the target ``name``; raise an Error if there is none."""
    targets = data().targets
    if name.lower() not in targets:
        raise Error(f"unknown target {name!r}; {suggest(name.lower(), targets)}")
    return targets[name.lower()]


def verdicts(
    name: str, program: MatmulProgram | None, site: Site | None = None, *, op: str = "linear"
) -> dict[Gemm, Verdict]:
    """Return the verdict of each GEMM of a product on the target ``name``.

    Args:
        program: the program of the product; None if the product is kept in high precision.
        site: gives the sizes and the kind of the product; None leaves the sizes open.
        op: the kind of the product if ``site`` is None.
    """
    chosen, result, kind = target(name), dict[Gemm, Verdict](), op if site is None else site.op
    for gemm in Gemm:
        gemm_program: GemmProgram | None = None if program is None else getattr(program, gemm)
        if gemm_program is None or (gemm_program.left.spec is None and gemm_program.right.spec is None):
            result[gemm] = Verdict("exact", "high precision")
            continue
        formats, why = _formats(chosen, gemm_program, kind)
        why = why or _exclusive(chosen, program) or _size(chosen, gemm, site)
        if program is not None and program.apart is not None and gemm is not Gemm.DGRAD:
            why = why or "some input channels are multiplied apart"
        result[gemm] = Verdict("simulated", why) if why else Verdict("native", formats)
    return result


def to_json(name: str, site: Site) -> dict[str, dict[str, str]]:
    """Return the verdict of each GEMM of a site as plain data."""
    return {str(gemm): verdict._asdict() for gemm, verdict in verdicts(name, site.program, site).items()}


def _formats(target: Target, gemm: GemmProgram, op: str) -> tuple[str, str]:
    """Return the formats of the operands, or why the target does not multiply them."""
    if gemm.gemm not in target.gemms:
        return "", f"{target.title} has no {gemm.gemm}: it serves, and does not train"
    if op not in ("linear", "grouped"):
        return "", f"{target.title} has no {_OPS.get(op, op)} of quantized operands"
    why, grouped = "", op == "grouped"
    operands = dict(zip(gemm.operands, (gemm.left, gemm.right), strict=True))
    pairs = target.grouped if grouped else target.products
    names, reasons = [], dict[str, list[str]]()
    for side, (operand, program) in enumerate(operands.items()):
        rows = operand in target.rows
        possible = dict.fromkeys(pair[side] for pair in pairs)
        names.append([name for name in possible if not _mismatch(name, program, rows)])
        if not names[side]:
            reasons.setdefault(_nearest(possible, program, rows), []).append(operand)
    if not pairs:
        why = f"{target.title} has no {'grouped products' if grouped else 'products'} of quantized operands"
    if not why and reasons:
        why = "; ".join(f"{' and '.join(where)}: {what}" for what, where in reasons.items())
    if why := why or next(_restrictions(target, gemm), ""):
        return "", why
    for left, right in pairs:
        if left in names[0] and right in names[1]:
            special = left in (target.mslk.grouped if grouped else target.mslk.products)
            return f"{left} x {right}" + MSLK * special, ""
    return "", f"{target.title} does not multiply {names[0][0]} with {names[1][0]}"


def _mismatch(name: str, program: OperandProgram, rows: bool) -> tuple[int, str] | None:
    """Return the first respect in which an operand differs from a format, after the number of respects before it; None
    if the operand fits in all.

    Args:
        rows: whether each row may have a tensor scale of its own.
    """
    spec = program.spec
    if name == "exact":
        return None if spec is None else (0, "quantized")
    if spec is None:
        return 0, "kept in high precision"
    known, scale = data().formats[name], spec.scale
    whole = ("tensor", "all", "row") if rows else ("tensor", "all")
    scaling = [part for part in program.at("group_scale") if not part.constant]  # a constant γ multiplies the result
    others = [part.name for part in scaling if part.group_granularity not in whole]
    elements = " or ".join(each.name.upper() for each in (spec.element, *spec.others))
    stored = scale.convention == "encode" and scale.format.mantissa_bits and known.scale != "fp32"
    respects = (
        (spec.element.name != known.element or bool(spec.others), f"{elements} elements"),
        (bool(others), f"{''.join(others[:1])} has scales of groups between block and tensor"),
        (scale.format.name != known.scale, f"{scale.format.name.upper()} scales, {name} has {known.scale.upper()}"),
        (bool(stored), "encode scales, which divide; hardware multiplies by scales"),
        (not _in_blocks(spec, known.block), f"blocks of {_words(spec)}, {name} has {known.block}"),
        (bool(scaling) and known.levels == 1, f"a tensor scale, {name} has none"),
    )
    return next(((place, what) for place, (differs, what) in enumerate(respects) if differs), None)


def _nearest(names: Iterable[str], program: OperandProgram, rows: bool) -> str:
    """Return the mismatch with the format that fits in most respects."""
    mismatches = [mismatch for name in names if (mismatch := _mismatch(name, program, rows)) is not None]
    return max(mismatches, key=lambda each: each[0], default=(0, ""))[1]


def _in_blocks(spec: QuantSpec, native: int | str) -> bool:
    block = spec.block[1] if isinstance(spec.block, tuple) else spec.block
    return block == native or (isinstance(native, int) and isinstance(block, int) and block % native == 0)


def _words(spec: QuantSpec) -> str:
    return " x ".join(map(str, spec.block)) if isinstance(spec.block, tuple) else str(spec.block)


def _restrictions(target: Target, gemm: GemmProgram) -> Iterator[str]:
    """Yield why techniques or roundings keep the target from multiplying the operands."""
    for operand, program in zip(gemm.operands, (gemm.left, gemm.right), strict=True):
        for stage, does in _OFF_GRID.items():
            for part in program.at(stage):
                yield f"{part.name} {does} {operand}"
        if (spec := program.spec) is None:
            continue
        if isinstance(spec.block, tuple) and operand not in target.square:
            yield f"{target.title} has no two-dimensional blocks of {operand}"
        if operand not in target.rounds:
            continue
        scale = spec.scale
        if spec.rounding == "stochastic" and operand not in target.stochastic:
            yield f"{target.title} does not round {operand} stochastically"
        if scale.rounding not in target.scales.get(scale.format.name, (scale.rounding,)):
            yield f"{target.title} does not round scales of {operand} by {scale.rounding}"
        if spec.rounding == "nearest" and spec.ties not in target.ties:
            yield f"{target.title} does not round ties of {operand} {spec.ties}"
    yield from (why for part in _parts(gemm) if (why := _refused(target, part)))


def _parts(gemm: GemmProgram) -> list[Part]:
    """Return the parts that act on the tensors of a GEMM."""
    parts = dict.fromkeys([*gemm.left.parts, *gemm.right.parts])
    return [*gemm.transforms, *(part for part in parts if any(map(part.acts_at, TENSOR_STAGES)))]


def _exclusive(target: Target, program: MatmulProgram | None) -> str:
    """Return which two techniques of a product the target does not have together; empty if there are none."""
    gemms = () if program is None else (program.fprop, program.dgrad, program.wgrad)
    names = {part.name for gemm in gemms for part in _parts(gemm)}
    return next((f"{target.title} has no {a} together with {b}" for a, b in target.exclusive if {a, b} <= names), "")


def _refused(target: Target, part: Part) -> str | None:
    if target.techniques is None:
        return None
    if part.name not in target.techniques:
        return f"{target.title} has no {part.name}"
    options = part.options.model_dump(mode="json", by_alias=True)
    for key, values in target.techniques[part.name].items():
        if options[key] not in values:
            return f"{target.title} has {part.name} with {key} {' or '.join(map(str, values))} only, not {options[key]}"
    return None


def _size(target: Target, gemm: Gemm, site: Site | None) -> str:
    """Return which axis of a GEMM the target cannot multiply at its size; empty if all sizes fit or are open."""
    if site is None or site.op not in ("linear", "grouped") or site.sizes is None:
        return ""
    axes = dict(zip(("tokens", "in_features", "out_features"), site.sizes, strict=True))
    contracted = {Gemm.FPROP: "in_features", Gemm.DGRAD: "out_features", Gemm.WGRAD: "tokens"}[gemm]
    for name, size in axes.items():
        multiples = target.multiples
        needed = multiples.tokens if name == "tokens" else multiples.result
        needed = multiples.contraction if name == contracted else needed
        if size % needed:
            return f"{name} {size} is not a multiple of {needed}"
    return ""


def summary(name: str, sites: Sequence[Site]) -> str:
    """Return a sentence with the shares of the training FLOPs of matrix products that a target runs natively, that are
    simulated, that run in high precision, and that belong to unquantized products."""
    flops = {"native": 0.0, "simulated": 0.0, "exact": 0.0}
    kept = [site for site in sites if not site.quantized]
    for site in sites:
        for verdict in verdicts(name, site.program, site).values():
            flops[verdict.kind] += site.flops or 0
    total = sum(flops.values()) or 1.0
    flops["kept"] = sum(len(Gemm) * (site.flops or 0.0) for site in kept)
    native, simulated, exact, unlisted = (f"{100 * part / total:.0f} %" for part in flops.values())
    chosen = target(name)
    old = chosen.torch is not None and Version(torch.__version__).release < Version(chosen.torch).release
    needs = f"; needs torch {chosen.torch}, this is {torch.__version__}" if old else ""
    listed = f" (unquantized products, not in the table: {len(kept)} with {unlisted})" if kept else ""
    return (
        f"{chosen.title}: {native} of the training FLOPs of matrix products native, {simulated} simulated, {exact} in "
        f"high precision{listed}{needs}"
    )
