"""From sums over elements to what a record says. Every field is described in docs/analysis.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fp4graph.analysis.metrics import LOWEST_EXPONENT

#: What can be asked for, with what it is.
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


def operand_record(sums: Mapping[str, Any], metrics: frozenset[str]) -> dict[str, Any]:
    """The record of one operand from :func:`fp4graph.analysis.metrics.operand_sums` and its histograms."""
    elements, signal, error = sums["elements"], sums["signal"], sums["error"]
    record: dict[str, Any] = {"elements": int(elements), "nonfinite": int(sums["nonfinite"])}
    if "snr" in metrics:
        record["snr_db"] = 10 * math.log10(signal / error) if signal > 0 and error > 0 else None
        record["gain"] = _ratio(sums["product"], signal)
    if "error" in metrics:
        for field, name in (
            ("relative_error", "error"),
            ("scale_bias", "scale_bias"),
            ("dead_zone", "dead_zone"),
            ("grid_noise", "grid_noise"),
            ("interaction", "interaction"),
        ):
            record[field] = _ratio(sums[name], signal)
    if "saturation" in metrics:
        record["saturated"] = _ratio(sums["saturated"], elements)
    if "underflow" in metrics:
        record["underflowed"] = _ratio(sums["underflowed"], elements)
    if "scales" in sums:
        record["scales"] = _trimmed(sums["scales"])
        record["zero_blocks"] = _ratio(sums["zero_blocks"], sums["blocks"])
    if "confidence" in sums:
        record["confidence"] = _ratio(sums["confidence"], sum(sums["confidence_histogram"]))
        record["confidence_histogram"] = _whole(sums["confidence_histogram"])
    if "latent_histogram" in sums:
        record["latent"] = {"limit": sums["latent_limit"], "counts": _whole(sums["latent_histogram"])}
    return record


def gemm_record(sums: Mapping[str, Any], metrics: frozenset[str]) -> dict[str, Any]:
    """The record of a backward GEMM from :func:`fp4graph.analysis.metrics.gradient_sums`; all None without sums."""
    if not sums:
        return {"bias": None, "deviation": None, "gain": None}
    exact = sums["exact"]
    return {
        "bias": _root(sums["offset"], exact),
        "deviation": _root(sums["variance"], exact),
        "gain": _ratio(sums["product"], exact),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _root(part: float, whole: float) -> float | None:
    return math.sqrt(part / whole) if whole > 0 else None


def _whole(counts: list[float]) -> list[int]:
    return [int(count) for count in counts]


def _trimmed(counts: list[float]) -> dict[str, Any]:
    """Without the empty classes at both ends: ``lowest`` is the exponent of the first that is left."""
    filled = [place for place, count in enumerate(counts) if count]
    if not filled:
        return {"lowest": 0, "counts": []}
    first, last = filled[0], filled[-1]
    return {"lowest": first + LOWEST_EXPONENT, "counts": _whole(counts[first : last + 1])}
