"""Where quantization hurts: the loss increase of quantizing one part of a model at a time, measured and estimated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Score:
    """The loss that one unit costs under one policy.

    Attributes:
        unit: name of the unit: a site, a block, an operand, a GEMM, or several of these with ", " between them.
        sites: the unit's sites, by the names of their modules; "(root)" is the root.
        operands: the unit's operands that the policy quantizes, such as "fprop.input".
        policy: name of the policy.
        increase: mean loss increase; NaN where it was only estimated.
        error: standard error of ``increase``; NaN where one pair is all there is.
        snr_db: signal-to-noise ratio of the unit's operands in dB; None where they are exact.
        estimate: the cheap estimate of ``increase``; None where there is none.
    """

    unit: str
    sites: tuple[str, ...]
    operands: tuple[str, ...]
    policy: str
    increase: float
    error: float
    snr_db: float | None = None
    estimate: float | None = None


@dataclass(frozen=True)
class Sensitivity:
    """The scores of every unit under every policy."""

    scores: tuple[Score, ...]
