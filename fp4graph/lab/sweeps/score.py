"""The efficiency score of "Elucidating the design space of FP4 training": the gain of a policy for its cost."""

from __future__ import annotations

import math
from typing import Literal, get_args

Rule = Literal["text", "table"]


def gain(loss: float, reference: float) -> float:
    """Return G = (M_ref − M)/M_ref: the share of the reference's loss that a run saves; negative where it loses more.

    Source: "Elucidating the design space of FP4 training", sec. 7; there M is the validation loss.
    M_ref is the loss of the better unquantized baseline. A diverged run (NaN or infinite loss) has G = -inf.

    Raises:
        ValueError: ``reference`` is not a positive finite number.
    """
    if not (math.isfinite(reference) and reference > 0):
        raise ValueError(f"the reference loss must be positive and finite, got {reference}: it divides the gain")
    return (reference - loss) / reference if math.isfinite(loss) else -math.inf


def score(loss: float, reference: float, complexity: float, rule: Rule = "text") -> float:
    """Return S, the gain of a run reduced by the cost of its techniques.

    - ``text``: S = G/(1 + Ω), as the paper defines it (sec. 7). It shrinks negative gains too: of two policies that
      lose equally much the costlier one scores higher.
    - ``table``: S = G/max(1, Ω) where G > 0 and S = G·max(1, Ω) elsewhere. The paper does not state this rule; 113 of
      the 118 scores that its appendix prints (Tables 3 to 8) follow it, and 46 follow ``text``.

    Ω, ``complexity``, is the summed weight of the techniques in use (``Policy.complexity``). A diverged run has -inf.

    Raises:
        ValueError: ``reference`` is not positive and finite, ``complexity`` is negative or not finite, or ``rule`` is
            not one of the two.
    """
    if not (math.isfinite(complexity) and complexity >= 0):
        raise ValueError(f"the complexity must be finite and not negative, got {complexity}: it is a sum of weights")
    saved = gain(loss, reference)
    if rule == "text":
        return saved / (1 + complexity)
    if rule == "table":
        weight = max(1.0, complexity)
        return saved / weight if saved > 0 else saved * weight
    raise ValueError(f"unknown rule {rule!r} of the score; known: {', '.join(get_args(Rule))}")
