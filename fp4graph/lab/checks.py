"""The checks of a diagnosis as a table: the fields that are judged, their normal ranges, and the remedies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple


class Units(NamedTuple):
    """The units in which values are compared."""

    transform: Callable[[float], float]
    inverse: Callable[[float], float]


_LINEAR = Units(float, float)
_LOG2 = Units(lambda value: math.log2(max(value, 1e-12)), lambda power: 2.0**power)
#: Logits of shares; a share below 10 % counts as 10 %, and a share above 98 % as 98 %.
_LOGIT = Units(
    lambda share: math.log((s := min(max(share, 0.1), 0.98)) / (1 - s)), lambda logit: 1 / (1 + math.exp(-logit))
)


@dataclass(frozen=True)
class Remedy:
    """Techniques that address a finding, the reason, and the sections of docs/findings.md with the evidence."""

    techniques: str
    reason: str
    evidence: str


_ERROR, _SWEEP, _GAUSSIAN = (
    "Where the error of a quantizer comes from", "A sweep over two tasks", "The Gaussian regression",
)  # fmt: skip
DIVERGENCE = Remedy(
    "a lower learning rate, gradient clipping, or stable_spam",
    "the loss rises with the gradients; StableSPAM clips them, and beats Adam in every format with bf16 parameters",
    _GAUSSIAN,
)
_NONFINITE = replace(DIVERGENCE, reason="the operand was infinite or NaN before its quantizer")
SCALES = Remedy(
    "tensor_scaling or loss_scaling",
    "values below the smallest scale are lost; a tensor scale reduces the error of NVFP4's dY from 12.6 to 0.9 %, and "
    "loss scaling reduces the loss on digits from 2.30 to 0.46",
    f"{_ERROR}; {_SWEEP}",
)
_OUTLIERS = Remedy(
    "outlier_clamp, outlier_fallback or hadamard",
    "an outlier sets the scale of its block, and the block's other elements become zero; outlier_fallback reduces the "
    "dead zone by a third or more; what the other two do to the dead zone was not measured",
    _ERROR,
)
_CLIPPING = Remedy(
    "scales rounded up, as in mxfp4-round-up",
    "decode scales that are rounded to nearest clip elements; they give the true weights a loss of 36 instead of 27",
    _GAUSSIAN,
)
_BIAS = Remedy(
    "stochastic_rounding of gradients",
    "stochastic rounding is unbiased by definition, though the sweep shows no effect of it on the loss",
    _SWEEP,
)
_OSCILLATION = Remedy(
    "freeze, dampen or q_ema",
    "they reduce the share of oscillating weights from 1.8 % to 0.4, 0.8 and 1.3 %",
    "Oscillation, with and without its remedies",
)
#: The remedies of a low signal-to-noise ratio, by the largest part of the operand's error.
OF_ERROR = {
    "dead_zone": _OUTLIERS,
    "scale_bias": Remedy("macro_block_scaling", "it reduces the scale bias by a seventh to two thirds", _ERROR),
    "grid_noise": Remedy("smaller blocks, outlier_fallback", "fallback reduces MXFP4's grid noise by a sixth", _ERROR),
}


class Quantity(NamedTuple):
    """A recorded field, the end at which it leaves its range (``sense`` 1: above, -1: below), and its remedy."""

    words: str
    form: str
    sense: int
    units: Units
    width: float  # the least half-width of its range, in ``units``
    remedy: Remedy | None  # None: the remedy comes from OF_ERROR
    limit: float | None = None  # a value that no healthy training crosses
    tensors: tuple[str, ...] = ("",)  # judges tensors whose names end in one of these
    peers: bool = True  # whether sites of one kind are comparable

    def badness(self, value: float) -> float:
        return self.sense * self.units.transform(value)


#: The judged fields (docs/analysis.md). ``underflowed`` is judged for inputs and weights only: as a model learns, most
#: gradients become small relative to the largest, and ``snr_db`` shows whether losing them matters.
QUANTITIES: dict[str, Quantity] = {
    "nonfinite": Quantity("number of elements that are not finite", "{:.0f}", 1, _LINEAR, 0.5, _NONFINITE, 0.0),
    "snr_db": Quantity("signal-to-noise ratio", "{:.1f} dB", -1, _LINEAR, 6.0, None, 3.0),
    "underflowed": Quantity("share rounded to zero", "{:.0%}", 1, _LOGIT, 1.5, _OUTLIERS, tensors=("input", "weight")),
    "saturated": Quantity("share clipped", "{:.1%}", 1, _LOGIT, 1.0, _CLIPPING),
    "limit_blocks": Quantity("share of scales at an end of their format", "{:.0%}", 1, _LOGIT, 3.0, SCALES),
    "bias": Quantity("bias of the gradient", "{:.0%}", 1, _LOG2, 2.0, _BIAS, 0.9),
    "oscillating": Quantity("share of oscillating weights", "{:.1%}", 1, _LOGIT, 1.5, _OSCILLATION, 0.25),
    "flips": Quantity("share of weights that flip in a step", "{:.1%}", 1, _LOGIT, 1.0, _OSCILLATION),
    "gradient_norm": Quantity("gradient norm", "{:.3g}", 1, _LOG2, math.log2(30), DIVERGENCE, peers=False),
    "loss": Quantity("loss", "{:.4g}", 1, _LINEAR, 0.0, DIVERGENCE),
}
