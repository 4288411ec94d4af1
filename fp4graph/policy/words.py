"""Describes specs and places of a policy in words, for tables and messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fp4graph.numerics.formats import FP32
from fp4graph.numerics.spec import QuantSpec
from fp4graph.numerics.words import block_words, describe
from fp4graph.technique.operands import Operand


def spec_words(spec: QuantSpec | None) -> dict[str, str] | None:
    """Return the columns of a table for one operand's spec; None for high precision."""
    if spec is None:
        return None
    scale = [spec.scale.format.name] + ([spec.scale.rounding] if spec.scale.format != FP32 else ["unrounded"])
    scale += [spec.scale.convention] if spec.scale.convention != "decode" else []
    scale += [f"ties {spec.scale.ties}"] if spec.scale.ties else []
    scale += [spec.scale.zero] if spec.scale.zero != "nearest_subnormal" else []
    bits = f", {spec.random_bits} bits" if spec.random_bits != 24 else ""
    return {
        "element": " or ".join(each.name for each in spec.elements) + (f" by {spec.selector}" if spec.others else ""),
        "block": block_words(spec),
        "scale": " ".join(scale),
        "rounding": f"nearest, ties {spec.ties}" if spec.rounding == "nearest" else f"stochastic{bits}",
        "source": spec.source + (", from master" if spec.from_master else ""),
    }


def summarize(operands: Mapping[Operand, QuantSpec | None]) -> str:
    """Return specs in words, with equal specs grouped: ``Q1 Q2: ...; Q3 Q5: ...``."""
    groups: dict[str, list[str]] = {}
    for number, operand in enumerate(Operand, 1):
        if operand in operands:
            groups.setdefault(describe(operands[operand]), []).append(f"Q{number}")
    return "; ".join(f"{' '.join(names)}: {text}" for text, names in groups.items())


def shortened(text: str) -> str:
    """Return ``text``, cut to 80 characters."""
    return text if len(text) <= 80 else f"{text[:77]}..."


def dotted(path: Sequence[str | int]) -> str:
    """Return ``rules[0].match.block`` for ``("rules", 0, "match", "block")``."""
    return re.sub(r"\.\[", "[", ".".join(f"[{part}]" if isinstance(part, int) else part for part in path))
