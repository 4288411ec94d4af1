"""The statistics, by their definitions: functions of tensors, without knowledge of models.

Sources: "Oscillation-Reduced MXFP4 Training for Vision Transformers" (TetraJet), A.1 to A.3; the rest is elementary,
and written out in each docstring.
"""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import Tensor

from fp4graph.analysis.decomposition import split_error
from fp4graph.analysis.lines import Lines, Moments, Rows, owners
from fp4graph.numerics.formats import ElementFormat

#: Exponents of block scales that histograms can tell apart: those of fp32, subnormals included.
LOWEST_EXPONENT, EXPONENTS = -149, 277
CONFIDENCE_BINS, LATENT_BINS = 20, 96
#: Upper edges of the classes of oscillation ratios; one more class holds what lies above the last.
RATIO_EDGES = (0.0, 0.5, 1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
#: R_w above which a weight oscillates (TetraJet sec. 7.2).
OSCILLATING = 16.0
#: What part of the larger of two quantized values their distance must exceed for a flip (see :func:`flipped`).
_FLIP = 1 / 8
_TINY = 2.0**-126


def operand_sums(lines: Lines) -> dict[str, Tensor]:
    """Sums over the elements of each operand, float64 ``[G]``, from which :func:`operand_record` makes statistics.

    Elements that are not finite, before or after quantization, are counted and left out. Computed in fp32, in units of
    the operand's largest magnitude.
    """
    x, q, ideal, owner = lines.x, lines.q, lines.ideal, owners(lines.rows.counts, lines.x.device)
    held = torch.tensor([math.prod(shape) for shape in lines.rows.shapes], dtype=torch.float64, device=x.device)
    usable: Tensor | None = None
    if not bool((x.sum() + q.sum() + ideal.sum()).isfinite()):
        usable = (x + q + ideal).isfinite() & lines.rows.held(x.device)
        x, q, ideal = (torch.where(usable, each, 0.0) for each in (x, q, ideal))
    largest = torch.zeros(len(held), device=x.device).scatter_reduce_(0, owner, x.abs().amax(1), "amax")
    unit = largest.clamp(min=_TINY)
    of_rows = unit[owner].unsqueeze(1)
    error, bias, dead, grid = (each.div_(of_rows) for each in split_error(x, q, ideal))  # squares stay within fp32
    x = x / of_rows
    signal = _dot(x, x)
    beyond = lines.ratio.abs().sub_(lines.element.max).clamp_(min=0)
    if usable is not None:
        beyond = torch.where(usable, beyond, 0.0)
    terms = {
        "signal": signal,
        "error": _dot(error, error),
        "product": signal + _dot(x, error),
        "scale_bias": _dot(bias, bias),
        "dead_zone": _dot(dead, dead),
        "grid_noise": _dot(grid, grid),
        "interaction": 2 * _dot(bias, grid),
        "saturated": _nonzero(beyond),
        "underflowed": _nonzero(dead),
    }
    if usable is not None:
        terms["elements"] = usable.sum(1)
    columns = torch.stack([each.double() for each in terms.values()], 1)
    summed = columns.new_zeros(len(held), len(terms)).index_add_(0, owner, columns)
    sums = dict(zip(terms, summed.unbind(1), strict=True))
    scale = unit.double().square()
    for name in ("signal", "error", "product", "scale_bias", "dead_zone", "grid_noise", "interaction"):
        sums[name] = sums[name] * scale
    elements = sums.setdefault("elements", held)
    return sums | {"nonfinite": held - elements}


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """Of rows, ``[R]``."""
    product: Tensor = torch.linalg.vecdot(a, b)
    return product


def _nonzero(a: Tensor) -> Tensor:
    """How many of each row, ``[R]``; a sum of bools takes many times longer."""
    return a.sign().abs_().sum(1)


def scale_sums(lines: Lines) -> dict[str, Tensor]:
    """Of each operand's scales: how many have each exponent floor(log2 S), float64 ``[G, EXPONENTS]`` from
    LOWEST_EXPONENT up, without those that are not finite or not positive; all there are, and those of blocks of zeros,
    float64 ``[G]``."""
    scales, owner = lines.scales, owners(lines.blocks, lines.scales.device)
    exponent = torch.frexp(scales).exponent.long() - 1
    place = (exponent - LOWEST_EXPONENT).clamp(0, EXPONENTS - 1)
    place = torch.where(scales.isfinite() & (scales > 0), place, EXPONENTS)
    blocks = torch.tensor(lines.blocks, dtype=torch.float64, device=scales.device)
    zeros = torch.zeros_like(blocks).index_add_(0, owner, (scales == 0).double())
    counts = _counted(place, owner, len(blocks), EXPONENTS + 1)[:, :EXPONENTS]
    return {"scales": counts, "blocks": blocks, "zero_blocks": zeros}


def _counted(place: Tensor, owner: Tensor, operands: int, classes: int) -> Tensor:
    """How many there are of each class, for each operand: float64 ``[G, classes]``. ``place``, int64, is used up."""
    counts = torch.bincount(place.add_(owner * classes).flatten(), minlength=operands * classes)
    return counts.double().reshape(-1, classes)


def confidence(ratio: Tensor, element: ElementFormat) -> Tensor:
    """Quantization confidence of latent weights w/S: min_i abs(w/S − thr_i) / MaxDist, of [0, 1].

    thr_i are the thresholds between neighbouring values of the format, and MaxDist is the largest distance to the
    nearest threshold that a weight of the same quantized value can have: half the width of its interval, for the
    largest value the way from the last threshold to it. What lies beyond the largest value counts as that value. For
    E2M1 thresholds are ±0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5 and MaxDist 0.25 for 0 to 1.5, 0.375, 0.5, 0.75 and 1 for
    2, 3, 4 and 6. (TetraJet A.2.)
    """
    thresholds, largest = (t.to(ratio.device) for t in _intervals(element))
    u = ratio.abs().clamp(max=element.max)
    place = torch.bucketize(u, thresholds)
    last = len(thresholds) - 1
    # The interval of zero reaches to the negative of the first threshold, which is farther from abs(u).
    below = torch.where(place > 0, u - thresholds[(place - 1).clamp(min=0)], torch.inf)
    above = torch.where(place <= last, thresholds[place.clamp(max=last)] - u, torch.inf)
    return torch.minimum(below, above) / largest[place]


@functools.cache
def _intervals(element: ElementFormat) -> tuple[Tensor, Tensor]:
    """Positive thresholds, and MaxDist of each magnitude; fp32."""
    values = torch.tensor(element.magnitudes(), dtype=torch.float64)
    thresholds = (values[1:] + values[:-1]) / 2
    edges = torch.cat([-thresholds[:1], thresholds])
    widths = torch.cat([(edges[1:] - edges[:-1]) / 2, values[-1:] - thresholds[-1:]])
    return thresholds.float(), widths.float()


def latent_sums(latent: Tensor, rows: Rows, element: ElementFormat, metrics: frozenset[str]) -> dict[str, Tensor]:
    """Of weights divided by their scales, ``[R, width]``: sums and histograms of their confidence and of themselves."""
    owner, limit, sums = owners(rows.counts, latent.device), element.max, {}
    if rows.padded:
        latent = torch.where(rows.held(latent.device), latent, torch.nan)
    if "confidence" in metrics:
        of_each = confidence(latent, element)
        total = latent.new_zeros(len(rows.shapes), dtype=torch.float64)
        sums["confidence"] = total.index_add_(0, owner, of_each.nansum(1, dtype=torch.float64))
        sums["confidence_histogram"] = histogram(of_each, owner, len(total), CONFIDENCE_BINS, 0, 1)
    if "latent" in metrics:
        sums["latent_histogram"] = histogram(latent, owner, len(rows.shapes), LATENT_BINS, -limit, limit)
        sums["latent_limit"] = torch.full((len(rows.shapes),), limit, dtype=torch.float64, device=latent.device)
    return sums


def histogram(rows: Tensor, owner: Tensor, operands: int, bins: int, low: float, high: float) -> Tensor:
    """Counts of ``rows [R, width]`` in ``bins`` equal classes of [low, high], for each operand: float64 ``[G, bins]``;
    what lies outside falls into the outermost ones, NaN into none."""
    place = (rows - low).mul_(bins / (high - low)).clamp_(0, bins - 1).nan_to_num_(nan=bins)
    return _counted(place.long(), owner.unsqueeze(1), operands, bins + 1)[:, :bins]


def gradient_sums(left: Moments, right: Moments, left_exact: Tensor, right_exact: Tensor) -> dict[str, Tensor]:
    """Sums over the entries of a backward GEMM's result ĝ = Q(L)·Q(R)ᵀ against g = L·Rᵀ, float64 ``[G]``.

    Rounding noise of different elements being independent, E[ĝ] = E[Q(L)]·E[Q(R)]ᵀ, and with v and m the variance and
    mean of an element, Var ĝ_ij = Σ_k v_ik·(m_jk² + v_jk) + m_ik²·v_jk.

    Args:
        left, right: of what was multiplied, lines ``[G, P, n, K]`` and ``[G, P, m, K]``; the means are known.
        left_exact, right_exact: the same lines of the factors in high precision, before any quantization.

    Returns:
        Sums of ``exact`` g², ``offset`` (E[ĝ] − g)², ``variance``, ``product`` g·E[ĝ].
    """
    assert left.mean is not None
    assert right.mean is not None
    a, b = left.mean.double(), right.mean.double()
    expected, exact = a @ b.mT, left_exact.double() @ right_exact.double().mT
    # Sums over i and j first: no product of matrices is needed for the variance.
    of_a, of_b = a.square().sum(-2), b.square().sum(-2)
    var_a, var_b = (
        torch.zeros_like(of_a) if each.variance is None else each.variance.double().sum(-2) for each in (left, right)
    )
    variance = var_a * (of_b + var_b) + of_a * var_b
    sums = {"exact": exact.square(), "offset": (expected - exact).square(), "product": exact * expected}
    return {name: term.sum((1, 2, 3)) for name, term in sums.items()} | {"variance": variance.sum((1, 2))}


# ------------------------------------------------------------------ from step to step


def oscillation_ratio(moved_q: Tensor, moved: Tensor) -> Tensor:
    """R_w = Σ_t abs(w_Q[t] − w_Q[t−1]) / Σ_t abs(w[t] − w[t−1]) per element; 0/0 is 0 and x/0 infinite. (A.1.)"""
    return torch.where(moved_q == 0, torch.zeros_like(moved), moved_q / moved)


def flipped(q: Tensor, former: Tensor, element: ElementFormat) -> Tensor:
    """Where the quantized value changed: by more than an eighth of the larger of the two.

    Neighbouring values of the 4-bit formats are a seventh of the larger apart or more. A smaller change is none of the
    element's: its block's scale was rounded anew, which moves values by a ninth at most (E4M3), or a tensor's scale
    followed its maximum. Formats with finer grids count half their smallest step instead. A power-of-two scale that
    doubles or halves moves the grid itself and is a flip for the elements whose value it changes.
    """
    return (q - former).abs() > _least_change(element) * torch.maximum(q.abs(), former.abs())


@functools.cache
def _least_change(element: ElementFormat) -> float:
    values = element.magnitudes()[1:]
    finest = min((high - low) / high for low, high in itertools.pairwise(values))
    return _FLIP if finest > _FLIP else finest / 2


def relative_change(x: Tensor, former: Tensor) -> Tensor:
    """‖X_t − X_(t−1)‖_F / ‖X_(t−1)‖_F, float64, 0-d; NaN where the denominator is 0.

    The rate of change r(X) is its mean over steps. (TetraJet A.3.)
    """
    former = former.double()
    norm = former.norm()
    return torch.where(norm > 0, (x.double() - former).norm() / norm, torch.nan)
