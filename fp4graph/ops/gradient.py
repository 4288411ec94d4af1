"""The surrogate gradient of a fake quantizer.

Rounding has no useful derivative. Training replaces it by 1 (straight-through) or by a surrogate gradient. This module
composes the surrogates that techniques give into the diagonal of the Jacobian of one operand's quantizer, which
multiplies the gradient element by element. Source: "Elucidating the design space of FP4 training", Eq. 1 to 5 (encode
scales) and Corollary 1 (tensor scales); the decode form follows from the same product rule.

With U = X/γ the normalized values in blocks of statistic Z, u the ratio that is rounded, Q(u) the element values:

    encode  s = Qmax/Z, u = s_q·U, f = Q(u)/s_q:
        f' = Q'(u) + ds/dU · q'(s)/s_q · (U·Q'(u) - Q(u)/s_q),   ds/dU = -Qmax/Z² · dZ/dU
    decode  S = Z/Qmax, u = U/S_q, f = Q(u)·S_q:
        f' = Q'(u) + dZ/dU / Qmax · q'(S) · (Q(u) - u·Q'(u))
    tensor scale  γ = g/κ, h = γ·f(X/γ):
        h' = f' + dg/dX / κ · (f(U) - U·f'(U))

Only the diagonal is kept, as in the paper, also of the f' inside h': the influence of an element on its neighbours
through the shared scale is dropped. Where Z = 0 the second summands are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4graph.numerics.scaling import constant
from fp4graph.ops import contract
from fp4graph.ops.contract import Acting
from fp4graph.technique import Quantization


def jacobian_diagonal(q: Quantization, parts: Acting) -> Tensor:
    """Return h'(X) at the quantization ``q``: fp32, in its blocked layout."""
    slope = _block_slope(q, parts)
    # From the innermost group scale outwards: for each, f is the quantizer inside it.
    inner = q.dequantized()
    u = q.values
    for part in reversed(q.group_scales):
        g, gamma = part.statistic, part.scale
        if g is not None and part.groups is not None:
            gradient = _last(parts, "group_gradient", part.values(), g, part.groups)
            if gradient is not None:
                kappa = g / gamma
                term = gradient / kappa * (inner - u * slope)
                slope = slope + torch.where(g > 0, term, torch.zeros_like(term))
        inner, u = inner * gamma, part.values()
    return slope


def _block_slope(q: Quantization, parts: Acting) -> Tensor:
    """Return f'(U): Eq. 1, or its decode form."""
    slope = _last(parts, "element_surrogate", q.ratio)
    slope = torch.ones_like(q.ratio) if slope is None else slope
    # dZ/dX = d(Z/γ)/dU for U = X/γ. Techniques get X, because their options are in units of X.
    x = q.undivided
    gradient = _last(parts, "statistic_gradient", x, q.statistic)
    if gradient is None:
        return slope
    qmax = constant(q.spec.element.max, q.z)
    encode = q.spec.scale.convention == "encode"
    ideal = qmax / q.z if encode else q.z / qmax
    scale_surrogate = _last(parts, "scale_surrogate", ideal)
    scale_surrogate = torch.ones_like(q.z) if scale_surrogate is None else scale_surrogate
    if encode:
        ds = -qmax / (q.z * q.z) * gradient
        term = ds * (scale_surrogate / q.scale) * (q.values * slope - q.elements / q.scale)
    else:
        term = gradient / qmax * scale_surrogate * (q.elements - q.ratio * slope)
    return slope + torch.where(q.z > 0, term, torch.zeros_like(term))


def _last(parts: Acting, stage: str, x: Tensor, *args: object) -> Tensor | None:
    """Return the result of ``stage`` on ``x``, in its shape, of the last technique that returns a tensor, or None."""
    answer: Tensor | None = None
    for part, context in contract.at_stage(stage, parts):
        factor = contract.run_like(part, stage, x, x, *args, context)
        answer = answer if factor is None else factor
    return answer
