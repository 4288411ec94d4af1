"""StableSPAM's conditioning of gradients by their history and its reset of moments, for any optimizer of Adam's kind.

All functions run before the update. :func:`new_statistics` makes the state of one parameter, :func:`condition` (or
:func:`condition_foreach`, for many at once) clips and rescales a gradient, :func:`cosine` schedules the momenta, and
:func:`reset_moments` starts Adam's moments afresh. The equations are those of :class:`fp4graph.optim.StableSPAM`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fp4graph.numerics import sharding

if TYPE_CHECKING:
    from torch import Tensor

#: Names of the statistics of one parameter's gradient, in the order of :func:`_conditioned`: m_max, m_norm and v_norm
#: before bias correction, and n, the number of gradients that they average.
STATISTICS = ("max_avg", "norm_avg", "norm_avg_sq", "conditioned")
#: Initial values of the state of optimizers of Adam's kind, of fp4graph, torch and timm, by the entry's name.
START: dict[str, float] = {
    "step": 0,
    "exp_avg": 0,
    "exp_avg_sq": 0,
    "max_exp_avg_sq": 0,
    "mu_product": 1,  # NAdam's products of momenta
    "m_schedule": 1,
    "exp_inf": 0,  # Adamax
    "exp_avg_var": 0,  # AdaBelief
    "max_exp_avg_var": 0,
    "exp_avg_diff": 0,  # Adan
    "neg_pre_grad": 0,
    "exp_avg_lr_1": 0,  # LaProp's bias corrections
    "exp_avg_lr_2": 0,
    "last_grad": 0,  # MARS
}
#: A technique that keeps a copy of an entry of the optimizer's state, to put it back later, names the copy with this
#: prefix and the entry's name, so that a reset reaches the copy.
HELD = "held."
#: The most elements updated per call. CPU_BATCH keeps them in a CPU's cache; BATCH bounds the memory for temporaries.
CPU_BATCH, BATCH = 1 << 20, 1 << 26


def cosine(step: int, total_steps: int | None, eta_min: float) -> float:
    """Return c at the ``step``-th step, counted from 1; without ``total_steps`` c is 1.

    c is half a cosine from 1 at step 0 to ``eta_min`` at ``total_steps + 1``, and stays there.
    """
    if total_steps is None:
        return 1.0
    step = min(step, total_steps + 1)
    return eta_min + (1.0 - eta_min) * (1 + math.cos(math.pi * step / (total_steps + 1))) / 2


def new_statistics(grad: Tensor) -> dict[str, Tensor]:
    """Return a parameter's statistics before its first gradient: 0-d zeros on the device of ``grad``, in fp32, or in
    fp64 if ``grad`` is fp64."""
    return {name: torch.zeros((), dtype=precision(grad), device=grad.device) for name in STATISTICS}


def condition(
    grad: Tensor, state: Mapping[str, Tensor], *, gamma1: float, gamma2: float, theta: float, eps: float
) -> Tensor:
    """Apply AdaClip, then AdaGN: return the gradient that Adam sees, a new tensor.

    Args:
        grad: the gradient of one parameter, of any shape; it is not changed.
        state: a dict with at least the entries of :func:`new_statistics`, which are updated in place.
        gamma1: γ1·c. gamma2, theta, eps: γ2, θ and eps.
    """
    dtype = precision(grad)
    old = tuple(state[name] for name in STATISTICS)
    peak = sharding.peak(grad, dtype)
    threshold = _threshold(peak, old, theta)
    spikes = grad.abs() > threshold.to(grad.dtype)
    # The casts matter only if ``grad`` is 0-d: a 0-d fp32 factor would promote it.
    clipped = torch.where(spikes, (grad * (threshold / peak)).to(grad.dtype), grad)
    norm = sharding.whole(torch.linalg.vector_norm(clipped, dtype=dtype))
    new, factor = _conditioned(peak, norm, old, gamma1, gamma2, theta, eps)
    for stored, value in zip(old, new, strict=True):
        stored.copy_(value)
    return clipped.mul_(factor)


def condition_foreach(
    grads: list[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    *,
    gamma1: float,
    gamma2: float,
    theta: float,
    eps: float,
) -> list[Tensor]:
    """Apply :func:`condition` to many gradients of one device and dtype, without waiting for an accelerator."""
    if not grads:
        return []
    cpu, dtype = on_cpu(grads[0]), precision(grads[0])
    stored = [[state[name] for state in states] for name in STATISTICS]
    old = tuple(torch.stack(values) for values in stored)
    if cpu:  # many times faster on a CPU than the norm
        low, high = (torch.stack(values).to(dtype) for values in zip(*map(torch.aminmax, grads), strict=True))
        peak = torch.maximum(-low, high)
    else:
        peak = torch.stack(list(torch._foreach_norm(grads, torch.inf, dtype=dtype)))
    threshold = _threshold(peak, old, theta)
    ratio = threshold / peak
    if cpu:
        scalars = zip(grads, peak.tolist(), threshold.tolist(), ratio.tolist(), strict=True)
        clipped = [g if top <= bound else _clip(g, bound, share) for g, top, bound, share in scalars]
    else:
        scaled = torch._foreach_mul(grads, list(ratio.unbind()))
        bounds = threshold.to(grads[0].dtype).unbind()
        clipped = [
            torch.where(g.abs() > bound, small.to(g.dtype), g)
            for g, bound, small in zip(grads, bounds, scaled, strict=True)
        ]
    norm = torch.stack(list(torch._foreach_norm(clipped, 2, dtype=dtype)))
    new, factor = _conditioned(peak, norm, old, gamma1, gamma2, theta, eps)
    for values, vector in zip(stored, new, strict=True):
        torch._foreach_copy_(values, vector.unbind())
    rescaled = torch._foreach_mul(clipped, list(factor.unbind()))
    return [x.to(g.dtype) for x, g in zip(rescaled, grads, strict=True)]


def reset_moments(state: MutableMapping[str, Any]) -> None:
    """Apply MoRet: set moments, their step, and the copies that techniques hold, to their initial values.

    ``state`` is a parameter's entry in ``optimizer.state``, or a parameter group, of any optimizer of Adam's kind.
    """
    for name, value in state.items():
        entry = str(name).rpartition(f".{HELD}")[2]
        if entry not in START:
            continue
        if not isinstance(value, torch.Tensor):
            state[name] = type(value)(START[entry])
        elif type(part := value.to_local() if sharding.is_sharded(value) else value) is torch.Tensor:
            part.fill_(START[entry])
        else:  # a quantized moment, as of torchao's 8-bit optimizers, takes values by copying alone
            part.copy_(torch.full(part.shape, START[entry], dtype=part.dtype, device=part.device))


def batches(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield ``tensors`` in batches of limited size, each of one device and dtype, and all contiguous or all not."""
    groups: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
    for x in tensors:
        groups.setdefault((x.device, x.dtype, x.is_contiguous()), []).append(x)
    for group in groups.values():
        limit = CPU_BATCH if on_cpu(group[0]) else BATCH
        batch: list[Tensor] = []
        size = 0
        for x in group:
            if batch and size + x.numel() > limit:
                yield batch
                batch, size = [], 0
            batch.append(x)
            size += x.numel()
        yield batch


def on_cpu(x: Tensor) -> bool:
    """Return whether reading a scalar from the device of ``x`` costs nothing."""
    return x.device.type == "cpu"


def precision(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: fp64 if ``x`` is fp64, else fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _clip(grad: Tensor, bound: float, share: float) -> Tensor:
    """Return ``where(abs(grad) > bound, grad * share, grad)``, bit for bit; a boolean mask would be slow on a CPU."""
    spikes = torch.nn.functional.hardshrink(grad, bound)
    unclipped = grad - spikes
    return unclipped.add_(spikes.mul_(share))


def _bias_correction(decay: float, count: Tensor) -> Tensor:
    """Return 1 - decay^count, accurate in fp32 also for a decay near 1."""
    return -torch.expm1(count * (math.log(decay) if decay > 0 else -math.inf))


def _threshold(peak: Tensor, old: tuple[Tensor, ...], theta: float) -> Tensor:
    """Return m̂_max after gradients whose largest magnitudes are ``peak``: 0-d, or one number per gradient."""
    return torch.lerp(old[0], peak, 1 - theta) / _bias_correction(theta, old[3] + 1)


def _conditioned(
    peak: Tensor, norm: Tensor, old: tuple[Tensor, ...], gamma1: float, gamma2: float, theta: float, eps: float
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return the statistics after a gradient, and AdaGN's factor: 0-d each, or one number per gradient."""
    max_avg, norm_avg, norm_avg_sq, count = old
    new = (
        torch.lerp(max_avg, peak, 1 - theta),
        torch.lerp(norm_avg, norm, 1 - gamma1),
        torch.lerp(norm_avg_sq, norm * norm, 1 - gamma2),
        count + 1,
    )
    m_hat = new[1] / _bias_correction(gamma1, new[3])
    v_hat = new[2] / _bias_correction(gamma2, new[3])
    factor = m_hat / (v_hat.sqrt() + eps) / norm
    finite = (norm * norm).isfinite()
    valid = tuple(torch.where(finite, value, before) for value, before in zip(new, old, strict=True))
    return valid, torch.where(norm == 0, 1.0, factor)
