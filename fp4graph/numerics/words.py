"""Describes a spec in words, for tables and messages."""

from __future__ import annotations

from fp4graph.numerics.spec import QuantSpec


def describe(spec: QuantSpec | None) -> str:
    """Return one operand's spec in a few words: ``e2m1/32 e8m0 ceil SR of fprop``; "-" for high precision."""
    if spec is None:
        return "-"
    words = [f"{spec.element_name}/{block_words(spec)}", spec.scale.format.name, spec.scale.rounding]
    words += [spec.scale.convention] if spec.scale.convention != "decode" else []
    words += [f"ties-{spec.scale.ties}"] if spec.scale.ties else []
    words += ["SR" if spec.rounding == "stochastic" else f"RTN-{spec.ties}"]
    words += ["of fprop"] if spec.source == "fprop" else []
    return " ".join(words)


def block_words(spec: QuantSpec) -> str:
    """Return the shape of blocks: ``32`` or ``16×16``."""
    return "×".join(map(str, spec.block)) if isinstance(spec.block, tuple) else str(spec.block)
