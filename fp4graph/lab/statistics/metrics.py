"""Computes the statistics: sums of tensors over a step, and from the sums the fields of docs/analysis.md.

Source of oscillation, confidence and rate of change: TetraJet (Chen et al. 2025), A.1 to A.3.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fp4graph.lab.statistics.decomposition import split_error
from fp4graph.lab.statistics.sampling import Moments, Sample
from fp4graph.numerics.formats import ElementFormat, ScaleFormat

#: The metrics, with their descriptions.
METRICS: dict[str, str] = {
    "snr": "signal-to-noise ratio of each operand in dB, and its gain ⟨Q(x), x⟩/‖x‖²",
    "error": "relative squared error of each operand and its parts: scale bias, dead zone, grid noise",
    "saturation": "share of elements beyond the largest value under their scale",
    "underflow": "share of elements that are not zero and become zero",
    "scales": "histogram of block scales by exponent, shares of zero blocks and of scales at an end of the range",
    "confidence": "quantization confidence of weights: mean and histogram",
    "latent": "histogram of latent weights w/S",
    "oscillation": "oscillation ratio R_w of weights: share over 16, histogram, examples",
    "flips": "how often quantized weights flip",
    "rate_of_change": "relative change per step of W and Q(W) and, with a probe, of Y",
    "gradient": "bias and standard deviation of dgrad's and wgrad's results relative to high precision",
    "gradient_norm": "norm of each weight's gradient, as the optimizer gets it",
}
#: Exponents of block scales that histograms can tell apart: those of fp32, subnormals included.
LOWEST_EXPONENT, EXPONENTS = -149, 277
CONFIDENCE_BINS, LATENT_BINS = 20, 96
#: Upper edges of the classes of oscillation ratios; one more class lies above the last edge.
RATIO_EDGES = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
#: R_w above which a weight oscillates (TetraJet sec. 7.2).
OSCILLATING = 16.0
#: The share of the larger of two quantized values that their distance must exceed for a flip (:func:`flipped`).
_FLIP = 1 / 8
#: Fields of an operand that are quotients: the metric, the field, and the sums that are divided.
_SHARES = (
    ("snr", "gain", "product", "signal"),
    ("error", "relative_error", "error", "signal"),
    *(("error", term, term, "signal") for term in ("scale_bias", "dead_zone", "grid_noise", "interaction")),
    ("saturation", "saturated", "saturated", "elements"),
    ("underflow", "underflowed", "underflowed", "elements"),
)


def operand_sums(sample: Sample) -> dict[str, Tensor]:
    """Return sums over a sample's finite elements, float64 0-d; elements that are not finite are only counted."""
    usable = (sample.x.double() + sample.q.double() + sample.ideal.double()).isfinite()
    x, q, ideal = (torch.where(usable, each, 0.0).double() for each in (sample.x, sample.q, sample.ideal))
    error, bias, dead, grid = split_error(x, q, ideal)
    squares = {"signal": x, "error": error, "scale_bias": bias, "dead_zone": dead, "grid_noise": grid}
    return {
        "elements": usable.sum().double(),
        "nonfinite": (~usable).sum().double(),
        "product": (x * q).sum(),
        "interaction": 2 * (bias * grid).sum(),
        "saturated": (usable & (sample.ratio.abs() > sample.element.max)).sum().double(),
        "underflowed": (dead != 0).sum().double(),
        **{name: values.square().sum() for name, values in squares.items()},
    }


def scale_sums(scales: Tensor, number: ScaleFormat) -> dict[str, Tensor]:
    """Count the positive finite scales by exponent floor(log2 S), float64 ``[EXPONENTS]`` from LOWEST_EXPONENT up.

    ``blocks`` counts all blocks, ``zero_blocks`` blocks of zeros, ``limit_blocks`` scales at an end of their format.
    """
    place = (torch.frexp(scales).exponent.long() - 1 - LOWEST_EXPONENT).clamp(0, EXPONENTS - 1)
    place = place[scales.isfinite() & (scales > 0)]
    return {
        "scales": torch.bincount(place, minlength=EXPONENTS).double(),
        "blocks": torch.tensor(float(scales.numel()), dtype=torch.float64, device=scales.device),
        "zero_blocks": (scales == 0).sum().double(),
        "limit_blocks": ((scales == number.min) | (scales == number.max)).sum().double(),
    }


def confidence(ratio: Tensor, element: ElementFormat) -> Tensor:
    """Return the quantization confidence of latent weights w/S: min_i abs(w/S − thr_i) / MaxDist, in [0, 1].

    thr_i are the thresholds between values of the format. MaxDist is half the width of the interval that rounds to one
    value. The interval of the largest value has no end; its MaxDist is the distance of that value to the last
    threshold. (TetraJet A.2.)
    """
    edges, largest = (t.to(ratio.device) for t in _intervals(element))
    u = ratio.abs().clamp(max=element.max).contiguous()  # torch.bucketize warns of a transposed weight (Conv1D)
    place = torch.bucketize(u, edges[1:-1])
    return torch.minimum(u - edges[place], edges[place + 1] - u) / largest[place]


@functools.cache
def _intervals(element: ElementFormat) -> tuple[Tensor, Tensor]:
    """Return the ends of the intervals of all magnitudes, from zero's interval to infinity, and their MaxDist; fp32."""
    values = torch.tensor(element.magnitudes(), dtype=torch.float64)
    thresholds = (values[1:] + values[:-1]) / 2
    edges = torch.cat([-thresholds[:1], thresholds])
    widths = torch.cat([edges.diff() / 2, values[-1:] - thresholds[-1:]])
    return torch.cat([edges, torch.tensor([torch.inf])]).float(), widths.float()


def latent_sums(latent: Tensor, element: ElementFormat, metrics: frozenset[str]) -> dict[str, Tensor]:
    """Return the sum and histogram of the confidence of latent weights w/S, and the histogram of w/S."""
    sums = {}
    if "confidence" in metrics:
        of_each = confidence(latent, element)
        sums["confidence"] = of_each.nansum(dtype=torch.float64)
        sums["confidence_histogram"] = histogram(of_each, CONFIDENCE_BINS, 0, 1)
    if "latent" in metrics:
        sums["latent_histogram"] = histogram(latent, LATENT_BINS, -element.max, element.max)
    return sums


def histogram(values: Tensor, bins: int, low: float, high: float) -> Tensor:
    """Count values in equal classes of [low, high], float64 ``[bins]``; values outside are clamped, NaN is left out."""
    place = ((values[~values.isnan()] - low) * (bins / (high - low))).clamp(0, bins - 1)
    return torch.bincount(place.long(), minlength=bins).double()


def gradient_sums(left: Moments, right: Moments, left_exact: Tensor, right_exact: Tensor) -> dict[str, Tensor]:
    """Return sums over the entries of a backward GEMM's result ĝ = Q(L)·Q(R)ᵀ against g = L·Rᵀ, float64 0-d.

    The arguments hold lines ``[P, n, K]`` and ``[P, m, K]`` of the factors: moments, and values before quantization.
    Rounding noise of different elements is independent: E[ĝ] = E[Q(L)]·E[Q(R)]ᵀ, and with an element's variance v and
    mean m, Var ĝ_ij = Σ_k v_ik·(m_jk² + v_jk) + m_ik²·v_jk. The sums are ``exact`` of g², ``offset`` of (E[ĝ] − g)²,
    ``variance``, and ``product`` of g·E[ĝ]; the result is empty if a mean is unknown.
    """
    if left.mean is None or right.mean is None:
        return {}
    a, b = left.mean.double(), right.mean.double()
    expected, exact = a @ b.mT, left_exact.double() @ right_exact.double().mT
    # Summing over i and j first avoids matrix products for the variance.
    of_a, of_b = a.square().sum(-2), b.square().sum(-2)
    var_a, var_b = (
        torch.zeros_like(of_a) if each.variance is None else each.variance.double().sum(-2) for each in (left, right)
    )
    return {
        "exact": exact.square().sum(),
        "offset": (expected - exact).square().sum(),
        "variance": (var_a * (of_b + var_b) + of_a * var_b).sum(),
        "product": (exact * expected).sum(),
    }


def operand_fields(sums: Mapping[str, Any], metrics: frozenset[str], limit: float | None = None) -> dict[str, Any]:
    """Return an operand's fields from its sums; the format's largest value, ``limit``, ends the field ``latent``."""
    fields: dict[str, Any] = {"elements": int(sums["elements"]), "nonfinite": int(sums["nonfinite"])}
    if "snr" in metrics:
        signal, error = sums["signal"], sums["error"]
        fields["snr_db"] = 10 * math.log10(signal / error) if signal > 0 and error > 0 else None
    fields |= {field: _ratio(sums[part], sums[of]) for metric, field, part, of in _SHARES if metric in metrics}
    if "scales" in sums:
        filled = [place for place, count in enumerate(sums["scales"]) if count] or [-LOWEST_EXPONENT, 0]
        counts = list(map(int, sums["scales"][filled[0] : filled[-1] + 1]))
        fields["scales"] = {"lowest": filled[0] + LOWEST_EXPONENT, "counts": counts}
        fields |= {name: _ratio(sums[name], sums["blocks"]) for name in ("zero_blocks", "limit_blocks")}
    if "confidence" in sums:
        fields["confidence"] = _ratio(sums["confidence"], sum(sums["confidence_histogram"]))
        fields["confidence_histogram"] = list(map(int, sums["confidence_histogram"]))
    if "latent_histogram" in sums:
        fields["latent"] = {"limit": limit, "counts": list(map(int, sums["latent_histogram"]))}
    return fields


def gemm_fields(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return a backward GEMM's fields from :func:`gradient_sums`; all None without sums."""
    bias, variance, gain = (_ratio(sums.get(name), sums.get("exact", 0)) for name in ("offset", "variance", "product"))
    bias, deviation = (None if each is None else math.sqrt(each) for each in (bias, variance))
    return {"bias": bias, "deviation": deviation, "gain": gain}


def _ratio(part: Any, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def oscillation_ratio(moved_q: Tensor, moved: Tensor) -> Tensor:
    """Return R_w = Σ_t abs(w_Q[t] − w_Q[t−1]) / Σ_t abs(w[t] − w[t−1]) per element; 0/0 is 0, x/0 infinite. (A.1.)"""
    return torch.where(moved_q == 0, torch.zeros_like(moved), moved_q / moved)


def flipped(q: Tensor, previous: Tensor, element: ElementFormat) -> Tensor:
    """Return where the quantized value changed by more than an eighth of the larger of the two values.

    Two neighbours on a 4-bit grid differ by at least a seventh of the larger value, so a move to a neighbour is a flip.
    A finer grid takes half of its smallest step instead of an eighth. An E4M3 scale that rounds otherwise moves a value
    by at most a ninth, which is no flip. A scale that doubles or halves (E8M0) moves the whole grid, which is a flip.
    """
    return (q - previous).abs() > _least_change(element) * torch.maximum(q.abs(), previous.abs())


@functools.cache
def _least_change(element: ElementFormat) -> float:
    finest = min((high - low) / high for low, high in itertools.pairwise(element.magnitudes()[1:]))
    return _FLIP if finest > _FLIP else finest / 2


def relative_change(x: Tensor, previous: Tensor) -> Tensor:
    """Return ‖X_t − X_(t−1)‖_F / ‖X_(t−1)‖_F, float64, 0-d; NaN if the denominator is 0. (TetraJet A.3.)"""
    previous = previous.double()
    norm = previous.norm()
    return torch.where(norm > 0, (x.double() - previous).norm() / norm, torch.nan)
