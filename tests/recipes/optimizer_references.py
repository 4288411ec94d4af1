"""Reference trainings of one weight matrix, in NumPy and float64, for the techniques that act around the optimizer.

The file is written from the papers, from the project's definitions (DEF) and from the prose of
docs/reference/techniques. It shares no code with the package. Two sources are named throughout:

- TJ: Chen et al. 2025, "Oscillation-Reduced MXFP4 Training for Vision Transformers";
- page: docs/reference/techniques/<technique>.md, where the paper and DEF are silent.

Every training takes a first weight w0 [N, K] and a callable `gradient(w, state) -> dw [N, K]`. `w` is the latent
(master) weight. `state` is one dict for the whole training: `state["step"]` is the number of the step, from 1, and
`state["forward_weight"]` [N, K] is the dequantized weight that the forward of this step multiplies with. The callable
may keep entries of its own in it.

Every training but StableSPAM's takes an `optimizer(w, g, state) -> w`, such as `partial(adamw, lr=1e-3)`. Its `state`
is a dict, empty at first; an optimizer assigns new arrays to the dict's entries and never writes into an array.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.recipes.arithmetic import quantize as block_quantize

Array = npt.NDArray[np.float64]
State = dict[str, Any]
Gradient = Callable[[Array, State], Array]
Optimizer = Callable[[Array, Array, State], Array]
Quantizer = Callable[[Array], Array]

E2M1_VALUES = np.array([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float64)
BLOCK = 32


# Optimizers


def adamw(
    w: Array,
    g: Array,
    state: State,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
) -> Array:
    """Returns the weight after one step of AdamW; w, g and the result are [N, K].

    w ← (1 − lr·wd)·w;  m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;
    w ← w − lr/(1 − β1^t) · m / (√v/√(1 − β2^t) + eps).
    `state` keeps "step", "m" and "v". Source: the documentation of torch.optim.AdamW, whose defaults these are.
    """
    beta1, beta2 = betas
    step = state.get("step", 0) + 1
    m: Array = beta1 * state.get("m", np.zeros_like(w)) + (1 - beta1) * g
    v: Array = beta2 * state.get("v", np.zeros_like(w)) + (1 - beta2) * g * g
    state["step"], state["m"], state["v"] = step, m, v
    w = w * (1 - lr * weight_decay)
    denominator = np.sqrt(v) / math.sqrt(1 - beta2**step) + eps
    return w - lr / (1 - beta1**step) * m / denominator


def sgd(w: Array, g: Array, state: State, *, lr: float, momentum: float = 0.0) -> Array:
    """Returns the weight after one step of SGD; w, g and the result are [N, K].

    b ← momentum·b + g;  w ← w − lr·b.
    `state` keeps "b" [N, K], which is 0 before the first step. Source: the documentation of torch.optim.SGD, without
    dampening, weight decay and Nesterov.
    """
    b = g if momentum == 0 else momentum * state.get("b", np.zeros_like(w)) + g
    if momentum != 0:
        state["b"] = b
    return w - lr * b


# The quantizer of forward weights


def tetrajet_weight(w: Array) -> Array:
    """Returns the dequantized weight Q2(w) [N, K] of TetraJet.

    E2M1 in blocks of 32 along K with scale S = 2^ceil(log2(amax/6)); S times the nearer of the values q1 < q2 around
    w/S, and q2 on a tie. Source: TJ 3.2.
    """
    return block_quantize(w, 1, element="e2m1", block=BLOCK, fmt="e8m0", rule="ceil", ties="up")


def tetrajet_scales(w: Array) -> Array:
    """Returns the scale S = 2^ceil(log2(amax/6)) of each element's block, [N, K] like w.

    Blocks of 32 along K; the last block is short where 32 does not divide K. The power k is the smallest with
    amax <= 6·2^k = 0.75·2^(k+3), found from amax = f·2^e with f in [0.5, 1): k = e − 3 if f <= 0.75, else e − 2. It is
    clamped to E8M0's range −127…127. A block of zeros gets S = 1; TJ's ε = 1e-8 in place of amax gives another S and
    the same zeros. Weights are taken to be finite.
    Source: TJ 3.2 and Alg. 1, lines 2 and 3 (whose "V" is the block of W).
    """
    scales = np.ones_like(w)
    for row in range(w.shape[0]):
        for first in range(0, w.shape[1], BLOCK):
            amax = np.max(np.abs(w[row, first : first + BLOCK]))
            if amax > 0:
                fraction, exponent = math.frexp(amax)
                power = exponent - 3 if fraction <= 0.75 else exponent - 2
                scales[row, first : first + BLOCK] = 2.0 ** min(max(power, -127), 127)
    return scales


def bracket(u: Array) -> tuple[Array, Array]:
    """Returns the E2M1 values q1 <= u <= q2 around each element of u, in arrays of u's shape.

    Source: TJ 3.2. Where u is a value of the grid, q1 = q2 = u is a decision of this file: TJ says "two nearest values"
    and DEF "bracket", which leave it open. (The authors' code takes u and the next value away from zero.)
    """
    lower = np.searchsorted(E2M1_VALUES, u, side="right") - 1
    upper = np.searchsorted(E2M1_VALUES, u, side="left")
    last = len(E2M1_VALUES) - 1
    return E2M1_VALUES[np.clip(lower, 0, last)], E2M1_VALUES[np.clip(upper, 0, last)]


# Q-EMA


def qema_weight(w: Array, average: Array) -> Array:
    """Returns the dequantized forward weight of Q-EMA; w, average and the result are [N, K].

    With S the scale of w's block and q1 <= w/S <= q2 the values around w/S, the result is S·q1 where
    abs(e/S − q1) < abs(e/S − q2), else S·q2, with e the average. Source: TJ sec. 5 and Alg. 1.
    """
    scales = tetrajet_scales(w)
    q1, q2 = bracket(w / scales)
    e = average / scales
    return scales * np.where(np.abs(e - q1) < np.abs(e - q2), q1, q2)


def qema_update(average: Array, w: Array, beta: float = 0.998) -> Array:
    """Returns the average after one optimizer step: e ← β·e + (1 − β)·w, all of them [N, K].

    `w` is the weight after the step. Source: TJ Eq. 10; before the first step e = w0 (DEF).
    """
    return beta * average + (1 - beta) * w


class QemaTraining(NamedTuple):
    """The result of `train_qema`: for each step its forward weight, and the weight and the average after the step."""

    weights: list[Array]
    averages: list[Array]
    forward_weights: list[Array]


def train_qema(
    w0: Array,
    gradient: Gradient,
    steps: int,
    optimizer: Optimizer,
    *,
    beta: float = 0.998,
    start_after: int = 0,
) -> QemaTraining:
    """Trains w0 [N, K] with Q-EMA and returns the weights, averages and forward weights of all steps.

    Each step: forward weight from w and e (`qema_weight`), gradient, optimizer, then e ← β·e + (1 − β)·w.
    The first `start_after` forwards round to nearest while the average is already updated, as in the authors' code,
    which waits for 10 steps (page q_ema). Source: TJ sec. 5 and Alg. 1.
    """
    w, average = np.array(w0, dtype=np.float64), np.array(w0, dtype=np.float64)
    optimizer_state: State = {}
    state: State = {}
    weights, averages, forward_weights = [], [], []
    for step in range(1, steps + 1):
        forward_weight = tetrajet_weight(w) if step <= start_after else qema_weight(w, average)
        state["step"], state["forward_weight"] = step, forward_weight
        w = optimizer(w, gradient(w, state), optimizer_state)
        average = qema_update(average, w, beta)
        weights.append(w)
        averages.append(average)
        forward_weights.append(forward_weight)
    return QemaTraining(weights, averages, forward_weights)


# Dampen


def half_cosine(step: int, total_steps: int, start: float) -> float:
    """Returns how far a schedule has gone at a step, from 0 to 1 along half a cosine.

    (1 − cos(π·p))/2 with p = (t − s·T)/(T − s·T) clipped to [0, 1], t the step from 1. Source: page dampen.
    """
    first = start * total_steps
    p = min(max((step - first) / (total_steps - first), 0.0), 1.0)
    return (1 - math.cos(math.pi * p)) / 2


def train_dampen(
    w0: Array,
    gradient: Gradient,
    steps: int,
    optimizer: Optimizer,
    *,
    strength: float = 0.01,
    total_steps: int | None = None,
    start: float = 0.0,
    quantize: Quantizer = tetrajet_weight,
) -> list[Array]:
    """Trains w0 [N, K] with the loss term λ·‖w − Q(w)‖² and returns the weight after each step.

    The gradient gains 2·λ_t·(w − Q(w)), with Q(w) taken as a constant, before the optimizer sees it. λ_t is `strength`,
    or, with `total_steps`, `strength` times `half_cosine`. Source: Nagel et al. 2022, sec. 4.2, as in TJ sec. 2; the
    schedule is from page dampen.
    """
    w = np.array(w0, dtype=np.float64)
    optimizer_state: State = {}
    state: State = {}
    weights = []
    for step in range(1, steps + 1):
        quantized = quantize(w)
        state["step"], state["forward_weight"] = step, quantized
        rate = strength if total_steps is None else strength * half_cosine(step, total_steps, start)
        g = gradient(w, state) + 2 * rate * (w - quantized)
        w = optimizer(w, g, optimizer_state)
        weights.append(w)
    return weights


# Freeze


class FreezeTraining(NamedTuple):
    """The result of `train_freeze`: values after each step, all [N, K]."""

    weights: list[Array]
    frozen: list[npt.NDArray[np.bool_]]
    frequencies: list[Array]
    means: list[Array]


def freeze_threshold(
    step: int, threshold: float, final_threshold: float | None, total_steps: int | None, start: float
) -> float:
    """Returns the flip frequency above which elements are frozen at a step, infinite where none are.

    Without `final_threshold` it is `threshold`. With it, θ_t = θ + (θ_end − θ)·`half_cosine` from step s·T on, and
    infinite before (page freeze). Step s·T itself may freeze, as in the code of Nagel et al.
    """
    if final_threshold is None:
        return threshold
    assert total_steps is not None
    if step < start * total_steps:
        return math.inf
    return threshold + (final_threshold - threshold) * half_cosine(step, total_steps, start)


def train_freeze(
    w0: Array,
    gradient: Gradient,
    steps: int,
    optimizer: Optimizer,
    *,
    momentum: float = 0.001,
    threshold: float = 0.01,
    final_threshold: float | None = None,
    total_steps: int | None = None,
    start: float = 0.0,
    quantize: Quantizer = tetrajet_weight,
) -> FreezeTraining:
    """Trains w0 [N, K] with iterative freezing and returns weights, masks, flip frequencies and means of all steps.

    After each step, with q = Q(w), m = `momentum`, θ = `threshold`:
    o = 1 where q changes in the direction opposite to that of its previous change, else 0;
    f ← m·o + (1 − m)·f;  w ← q̄ for good where f > θ, else q̄ ← m·q + (1 − m)·q̄; first f = 0 and q̄ = Q(w0).
    Source: Nagel et al. 2022, sec. 4.1 and 4.3, and page freeze, which takes q dequantized and counts a change where
    abs(q_t − q_{t−1}) > max(abs q_t, abs q_{t−1})/8. Decisions of this file:
    - f is compared after its update and q̄ is the one from before the step, as in the code of Nagel et al.;
    - frozen elements are put back before the weight is quantized, since they are part of their block's amax;
    - q_{t−1} of a newly frozen element is the one measured before it was frozen.
    """
    w = np.array(w0, dtype=np.float64)
    quantized = quantize(w)
    mean = quantized.copy()
    direction = np.zeros_like(w)
    frequency = np.zeros_like(w)
    frozen = np.zeros(w.shape, dtype=bool)
    frozen_at = np.zeros_like(w)
    optimizer_state: State = {}
    state: State = {}
    result = FreezeTraining([], [], [], [])
    for step in range(1, steps + 1):
        state["step"], state["forward_weight"] = step, quantize(w)
        w = optimizer(w, gradient(w, state), optimizer_state)
        w = np.where(frozen, frozen_at, w)

        previous, quantized = quantized, quantize(w)
        changed = np.abs(quantized - previous) > np.maximum(np.abs(quantized), np.abs(previous)) / 8
        change = np.where(changed, np.sign(quantized - previous), 0.0)
        oscillated = change * direction == -1
        direction = np.where(changed, change, direction)
        frequency = momentum * oscillated + (1 - momentum) * frequency

        limit = freeze_threshold(step, threshold, final_threshold, total_steps, start)
        newly_frozen = (frequency > limit) & ~frozen
        frozen_at = np.where(newly_frozen, mean, frozen_at)
        frozen = frozen | newly_frozen
        w = np.where(frozen, frozen_at, w)
        mean = np.where(frozen, mean, momentum * quantized + (1 - momentum) * mean)

        result.weights.append(w)
        result.frozen.append(frozen)
        result.frequencies.append(frequency)
        result.means.append(mean)
    return result


# Q-Ramping


def oscillation_ratio(dist_q: Array, dist_w: Array) -> Array:
    """Returns R = distQ/distW for each element, with 0/0 = 0 and x/0 = ∞; all [N, K].

    Source: TJ A.1, DEF.
    """
    ratio = np.where(dist_q > 0, np.inf, 0.0)
    return np.divide(dist_q, dist_w, out=ratio, where=dist_w > 0)


def ramping_factor(ratio: Array, n_max: int, k1: float = 16.0, k2: int = 5) -> Array:
    """Returns N = min(k2·⌊R/k1⌋ + 1, N_max) for each element; R and N are [N, K]. Source: TJ Alg. 2, lines 6 and 7."""
    factor: Array = np.minimum(k2 * np.floor(ratio / k1) + 1, n_max)
    return factor


class RampingTraining(NamedTuple):
    """The result of `train_qramping`: the weight after each step, and R and N (all [N, K]) after each detection."""

    weights: list[Array]
    ratios: list[Array]
    factors: list[Array]


def train_qramping(
    w0: Array,
    gradient: Gradient,
    steps: int,
    optimizer: Optimizer,
    *,
    t_update: int,
    n_max: int,
    t0: int = 30,
    k1: float = 16.0,
    k2: int = 5,
    restore: bool = False,
    keep_pending: bool = False,
    quantize: Quantizer = tetrajet_weight,
) -> RampingTraining:
    """Trains w0 [N, K] with Q-Ramping and returns the weights of all steps and R and N of all detections.

    With `restore`, the weight listed for a detection's last step is the restored one.

    The first `t0` of every `t_update` steps are plain ones, over which distW = Σ abs(w_t − w_{t−1}) and
    distQ = Σ abs(Q(w_t) − Q(w_{t−1})) are summed from the weight before them; then N is set from R = distQ/distW. In
    the steps after that, an element collects N gradients and then steps with their mean and N times the learning rate.
    Source: TJ sec. 6 and Alg. 2. From page q_ramping, since the paper leaves them open:
    - an element that waits keeps its entries of the optimizer's state (moments), while scalars of it (the step count,
      and so bias corrections) advance at every step;
    - N times the learning rate is w ← w + N·Δw, with Δw the optimizer's whole step, decoupled weight decay included:
      the decay acts at N times the rate at every N-th step (the authors' code decays at every step);
    - `restore`: the weight and the optimizer's state return after a detection to what they were before it. Its steps
      count among `t_update` either way.
    Decisions of this file:
    - gradients that an element has collected when a detection begins are dropped. With `keep_pending` they are kept, as
      in the authors' code: the element steps when the number collected is a multiple of its new N, and as many times
      as far;
    - moments that do not exist yet count as zero.
    """
    w = np.array(w0, dtype=np.float64)
    factor = np.ones_like(w)
    total, count = np.zeros_like(w), np.zeros_like(w)
    optimizer_state: State = {}
    state: State = {}
    result = RampingTraining([], [], [])
    for step in range(1, steps + 1):
        phase = (step - 1) % t_update
        quantized = quantize(w)
        state["step"], state["forward_weight"] = step, quantized
        if phase == 0:
            saved_w, saved_state = w, dict(optimizer_state)
            dist_w, dist_q = np.zeros_like(w), np.zeros_like(w)
            if not keep_pending:
                total, count = np.zeros_like(w), np.zeros_like(w)
        g = gradient(w, state)

        if phase < t0:
            moved = optimizer(w, g, optimizer_state)
            dist_w += np.abs(moved - w)
            dist_q += np.abs(quantize(moved) - quantized)
            w = moved
            if phase == t0 - 1:
                ratio = oscillation_ratio(dist_q, dist_w)
                factor = ramping_factor(ratio, n_max, k1, k2)
                result.ratios.append(ratio)
                result.factors.append(factor)
                if restore:
                    w, optimizer_state = saved_w, saved_state
        else:
            total, count = total + g, count + 1
            due = count % factor == 0
            before = dict(optimizer_state)
            moved = optimizer(w, total / count, optimizer_state)
            for name, value in optimizer_state.items():
                if isinstance(value, np.ndarray) and value.shape == w.shape:
                    optimizer_state[name] = np.where(due, value, before.get(name, np.zeros_like(w)))
            moved = np.where(count == 1, moved, w + count * (moved - w))
            w = np.where(due, moved, w)
            total, count = np.where(due, 0.0, total), np.where(due, 0.0, count)
        result.weights.append(w)
    return result


# StableSPAM


def stable_spam_cosine(step: int, total_steps: int | None, eta_min: float = 0.5, upstream_period: bool = True) -> float:
    """Returns c_t, the cosine from 1 to eta_min over total_steps T, at step t from 1; 1 where T is None.

    c_t = η + (1 − η)·(1 + cos(π·min(t, P)/P))/2. P is T + 1 in the authors' code, whose CosineAnnealingLR has T_max =
    total_T + 1; DEF does not count that among its defects. `upstream_period=False` takes P = T. Beyond P, c
    stays at eta_min: that the authors' schedule climbs again is one of the defects.
    """
    if total_steps is None:
        return 1.0
    period = total_steps + 1 if upstream_period else total_steps
    return eta_min + (1 - eta_min) * (1 + math.cos(math.pi * min(step, period) / period)) / 2


def stable_spam_condition(
    g: Array,
    state: State,
    *,
    c: float = 1.0,
    gamma1: float = 0.7,
    gamma2: float = 0.9,
    theta: float = 0.999,
    eps: float = 1e-8,
) -> Array:
    """Returns the gradient [N, K] of one tensor after AdaClip and AdaGN, and updates the scalars in `state`.

    AdaClip: m_max ← θ·m_max + (1 − θ)·max abs(g), m̂_max = m_max/(1 − θ^n); entries with abs(g_i) > m̂_max become
    g_i/max abs(g)·m̂_max.
    AdaGN, on what AdaClip returns: m_norm ← γ1·c·m_norm + (1 − γ1·c)·‖g‖, m̂_norm = m_norm/(1 − (γ1·c)^n);
    v_norm ← γ2·v_norm + (1 − γ2)·‖g‖², v̂_norm = v_norm/(1 − γ2^n); g ← g/‖g‖·m̂_norm/(√v̂_norm + eps).
    n counts the gradients averaged and is never reset. Source: DEF, steps 2 and 3. As in the
    authors' code, a gradient of zeros enters the averages and is returned as it is.
    """
    if not np.all(np.isfinite(g)):
        raise ValueError("The reference of StableSPAM does not define gradients that are not finite.")
    n = state["n"] = state.get("n", 0) + 1
    largest = float(np.max(np.abs(g)))
    m_max = state["m_max"] = theta * state.get("m_max", 0.0) + (1 - theta) * largest
    m_max_hat = m_max / (1 - theta**n)
    if largest > 0:
        g = np.where(np.abs(g) > m_max_hat, g / largest * m_max_hat, g)

    norm = float(np.sqrt(np.sum(g * g)))
    momentum = gamma1 * c
    m_norm = state["m_norm"] = momentum * state.get("m_norm", 0.0) + (1 - momentum) * norm
    v_norm = state["v_norm"] = gamma2 * state.get("v_norm", 0.0) + (1 - gamma2) * norm**2
    if norm > 0:
        m_norm_hat, v_norm_hat = m_norm / (1 - momentum**n), v_norm / (1 - gamma2**n)
        g = g / norm * (m_norm_hat / (math.sqrt(v_norm_hat) + eps))
    return g


def _gradient_function(grads: Sequence[Array] | Gradient, steps: int | None) -> tuple[Gradient, int]:
    """Returns a gradient callable and the number of steps, from a callable and `steps` or from a list of gradients."""
    if callable(grads):
        if steps is None:
            raise ValueError("A gradient that is a function needs steps.")
        return grads, steps
    listed = [np.asarray(g, dtype=np.float64) for g in grads]
    return lambda w, state: listed[state["step"] - 1], len(listed) if steps is None else steps


def stable_spam(
    w0: Array,
    grads: Sequence[Array] | Gradient,
    *,
    steps: int | None = None,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    gamma1: float = 0.7,
    gamma2: float = 0.9,
    theta: float = 0.999,
    total_steps: int | None = None,
    eta_min: float = 0.5,
    reset_interval: int | None = 1000,
    upstream_period: bool = True,
    quantize: Quantizer | None = None,
) -> list[Array]:
    """Trains w0 [N, K] with the corrected optimizer StableSPAM and returns the weight after each step.

    Per step t: w ← w·(1 − lr·wd); the gradient through AdaClip and AdaGN (`stable_spam_condition`); where
    `reset_interval` divides t, Adam's moments and its step count k ← 0; k ← k + 1; then Adam with β1·c_t:
    m ← β1·c·m + (1 − β1·c)·g;  v ← β2·v + (1 − β2)·g²;
    w ← w − lr/(1 − (β1·c)^k)·m/(√v/√(1 − β2^k) + eps).
    `grads` is a list of gradients, or a gradient callable with `steps`; `quantize` makes the callable's forward weight,
    w itself without it. Source: DEF, defects corrected: the reset clears moments that the same step
    then updates, and the averages of AdaClip and AdaGN keep their own count. eps is one number in the authors' code.
    """
    gradient, steps = _gradient_function(grads, steps)
    w = np.array(w0, dtype=np.float64)
    m, v, k = np.zeros_like(w), np.zeros_like(w), 0
    averages: State = {}
    state: State = {}
    weights = []
    for step in range(1, steps + 1):
        state["step"], state["forward_weight"] = step, w if quantize is None else quantize(w)
        g = gradient(w, state)
        c = stable_spam_cosine(step, total_steps, eta_min, upstream_period)

        w = w * (1 - lr * weight_decay)
        g = stable_spam_condition(g, averages, c=c, gamma1=gamma1, gamma2=gamma2, theta=theta, eps=eps)
        if reset_interval is not None and step % reset_interval == 0:
            m, v, k = np.zeros_like(w), np.zeros_like(w), 0
        k += 1
        beta1, beta2 = betas[0] * c, betas[1]
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        w = w - lr / (1 - beta1**k) * m / (np.sqrt(v) / math.sqrt(1 - beta2**k) + eps)
        weights.append(w)
    return weights


def stable_spam_conditioned_adam(
    w0: Array,
    grads: Sequence[Array] | Gradient,
    *,
    steps: int | None = None,
    decoupled: bool = True,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    adam_eps: float = 1e-8,
    weight_decay: float = 1e-2,
    gamma1: float = 0.7,
    gamma2: float = 0.9,
    theta: float = 0.999,
    eps: float = 1e-8,
    total_steps: int | None = None,
    eta_min: float = 0.5,
    reset_interval: int | None = 1000,
    upstream_period: bool = True,
    quantize: Quantizer | None = None,
) -> list[Array]:
    """Trains w0 [N, K] with a user's AdamW or Adam under the technique stable_spam; returns the weight after each step.

    Per step t: the gradient through AdaClip and AdaGN; where `reset_interval` divides t, the optimizer's state ← that
    of a new one; then the optimizer's own step with β1·c_t in place of β1. `decoupled` takes torch's AdamW, else Adam,
    which adds weight_decay·w to the conditioned gradient. Source: page stable_spam. Differences from `stable_spam`:
    AdaGN's `eps` and Adam's `adam_eps` are two numbers; weight decay is the optimizer's own, in kind and default
    (torch's AdamW has 0.01, Adam 0).
    """
    gradient, steps = _gradient_function(grads, steps)
    w = np.array(w0, dtype=np.float64)
    optimizer_state: State = {}
    averages: State = {}
    state: State = {}
    weights = []
    for step in range(1, steps + 1):
        state["step"], state["forward_weight"] = step, w if quantize is None else quantize(w)
        c = stable_spam_cosine(step, total_steps, eta_min, upstream_period)
        g = stable_spam_condition(gradient(w, state), averages, c=c, gamma1=gamma1, gamma2=gamma2, theta=theta, eps=eps)
        if reset_interval is not None and step % reset_interval == 0:
            optimizer_state = {}
        if not decoupled:
            g = g + weight_decay * w
        w = adamw(
            w,
            g,
            optimizer_state,
            lr=lr,
            betas=(betas[0] * c, betas[1]),
            eps=adam_eps,
            weight_decay=weight_decay if decoupled else 0.0,
        )
        weights.append(w)
    return weights
