"""The fields of a measurement, from sums over elements. docs/analysis.md describes every field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fp4graph.analysis.metrics import LOWEST_EXPONENT

#: The metrics that can be asked for, with their descriptions.
METRICS: dict[str, str] = {
    "snr": "signal-to-noise ratio of each operand in dB, and its gain ⟨Q(x), x⟩/‖x‖²",
    "error": "relative squared error of each operand and its parts: scale bias, dead zone, grid noise",
    "saturation": "share of elements beyond the largest value under their scale",
    "underflow": "share of elements that are not zero and become zero",
    "scales": "histogram of block scales, by exponent, and share of blocks of zeros",
    "confidence": "quantization confidence of weights: mean and histogram",
    "latent": "histogram of latent weights w/S",
    "oscillation": "oscillation ratio R_w of weights: share over 16, histogram, examples",
    "flips": "how often quantized weights flip",
    "rate_of_change": "relative change per step of W and Q(W), and of Y where a probe is given",
    "gradient": "bias and standard deviation of dgrad's and wgrad's results against high precision",
}
#: Fields of an operand by metric, each the quotient of two sums.
_SHARES: dict[str, dict[str, tuple[str, str]]] = {
    "snr": {"gain": ("product", "signal")},
    "error": {
        "relative_error": ("error", "signal"),
        **{term: (term, "signal") for term in ("scale_bias", "dead_zone", "grid_noise", "interaction")},
    },
    "saturation": {"saturated": ("saturated", "elements")},
    "underflow": {"underflowed": ("underflowed", "elements")},
}


def operand_fields(sums: Mapping[str, Any], metrics: frozenset[str], limit: float | None = None) -> dict[str, Any]:
    """Return an operand's fields from :func:`fp4graph.analysis.metrics.operand_sums` and its histograms.

    Args:
        limit: the largest value of the element format, where the latent weights' histogram ends.
    """
    fields: dict[str, Any] = {"elements": int(sums["elements"]), "nonfinite": int(sums["nonfinite"])}
    if "snr" in metrics:
        signal, error = sums["signal"], sums["error"]
        fields["snr_db"] = 10 * math.log10(signal / error) if signal > 0 and error > 0 else None
    for metric, shares in _SHARES.items():
        if metric in metrics:
            fields |= {field: _ratio(sums[part], sums[of]) for field, (part, of) in shares.items()}
    if "scales" in sums:
        fields["scales"] = _trimmed(sums["scales"])
        fields["zero_blocks"] = _ratio(sums["zero_blocks"], sums["blocks"])
    if "confidence" in sums:
        fields["confidence"] = _ratio(sums["confidence"], sum(sums["confidence_histogram"]))
        fields["confidence_histogram"] = _counts(sums["confidence_histogram"])
    if "latent_histogram" in sums:
        fields["latent"] = {"limit": limit, "counts": _counts(sums["latent_histogram"])}
    return fields


def gemm_fields(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return a backward GEMM's fields from :func:`fp4graph.analysis.metrics.gradient_sums`; all None without sums."""
    bias, variance, gain = (_ratio(sums.get(name), sums.get("exact", 0)) for name in ("offset", "variance", "product"))
    roots = {"bias": bias, "deviation": variance}
    return {**{name: None if each is None else math.sqrt(each) for name, each in roots.items()}, "gain": gain}


def _ratio(part: Any, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _counts(counts: list[float]) -> list[int]:
    return [int(count) for count in counts]


def _trimmed(counts: list[float]) -> dict[str, Any]:
    """Drop the empty classes at both ends; ``lowest`` is the exponent of the first class that is left."""
    filled = [place for place, count in enumerate(counts) if count]
    if not filled:
        return {"lowest": 0, "counts": []}
    first, last = filled[0], filled[-1]
    return {"lowest": first + LOWEST_EXPONENT, "counts": _counts(counts[first : last + 1])}
