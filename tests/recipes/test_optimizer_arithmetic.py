"""The references of optimizers and their techniques equal examples by hand; AdamW and SGD equal torch's."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from tests.recipes import optimizer_references as references
from tests.recipes.optimizer_references import Array, State


def matrix(*values: float) -> Array:
    """Returns the values as a matrix of one row, [1, K]."""
    return np.array([values], dtype=np.float64)


def scripted(*gradients: float):
    """Returns a gradient callable for a [1, 1] weight that gives the listed gradients, step by step."""
    return lambda w, state: np.full_like(w, gradients[state["step"] - 1])


def round_half_up(w: Array) -> Array:
    """Returns w rounded to integers: a quantizer without blocks, for examples of one element."""
    return np.floor(w + 0.5)


# AdamW and SGD


def test_adamw_by_hand():
    """Two steps on two numbers, eps 0. In step 1 the update is lr·sign(g), in step 2 it is lr·m̂/0.5 for the first."""
    state: State = {}
    step = partial(references.adamw, state=state, lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.1)
    w = step(matrix(1.0, -2.0), matrix(0.5, -1.0))
    np.testing.assert_allclose(w, matrix(0.99 - 0.1, -1.98 + 0.1), rtol=1e-14)
    w = step(w, matrix(-0.5, -1.0))
    # m = 0.9·0.05 − 0.1·0.5 = −0.005, m̂ = −0.005/0.19; v̂ = 0.25 throughout.
    np.testing.assert_allclose(w, matrix(0.8811 + 0.1 * 0.005 / 0.19 / 0.5, -1.8612 + 0.1), rtol=1e-14)


@pytest.mark.parametrize(
    ("reference", "torch_class", "options"),
    [
        (references.adamw, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
        (references.adamw, torch.optim.AdamW, {}),
        (references.sgd, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (references.sgd, torch.optim.SGD, {"lr": 0.1}),
    ],
)
def test_optimizers_equal_torchs(reference, torch_class, options):
    rng = np.random.default_rng(0)
    w, state = rng.standard_normal((3, 5)), {}
    p = torch.nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = torch_class([p], **options)
    for _ in range(7):
        g = rng.standard_normal((3, 5))
        p.grad = torch.from_numpy(g.copy())
        optimizer.step()
        w = reference(w, g, state, **options)
        np.testing.assert_allclose(w, p.detach().numpy(), rtol=1e-12, atol=1e-14)


# Q-EMA


def test_tetrajet_scales():
    """TJ 3.2: amax 31 has S = 8 and amax/S = 3.875; amax 6 has S = 1, and the next float has S = 2."""
    assert references.tetrajet_scales(matrix(31.0, 1.0)).tolist() == [[8.0, 8.0]]
    assert references.tetrajet_scales(matrix(6.0))[0, 0] == 1
    assert references.tetrajet_scales(matrix(np.nextafter(6.0, 7.0)))[0, 0] == 2
    assert references.tetrajet_scales(matrix(3.0))[0, 0] == 0.5
    assert references.tetrajet_scales(matrix(*[0.0] * 32, 5.0))[0, [0, 32]].tolist() == [1.0, 1.0]


def test_qema_rounds_to_the_candidate_nearer_to_the_average():
    """TJ Figure 3's threshold: w/S = −0.76 is between −1 and −0.5. The block's maximum 4 makes S = 1."""
    w = matrix(4.0, -0.76, -0.76, -0.76, -0.74, -0.74)
    assert references.tetrajet_weight(w)[0, 1:].tolist() == [-1.0, -1.0, -1.0, -0.5, -0.5]
    average = matrix(4.0, -0.6, -0.75, 5.0, -0.76, -9.0)  # nearer to −0.5; a tie, which goes up; beyond both sides
    assert references.qema_weight(w, average).tolist() == [[4.0, -0.5, -0.5, -0.5, -1.0, -1.0]]
    # For a value of the grid both candidates are that value, with any average.
    assert references.qema_weight(matrix(4.0, 1.5), matrix(-4.0, 3.0)).tolist() == [[4.0, 1.5]]


def test_qema_with_the_weight_as_average_rounds_to_nearest():
    w = np.random.default_rng(1).standard_normal((4, 70)).astype(np.float32).astype(np.float64)
    np.testing.assert_array_equal(references.qema_weight(w, w), references.tetrajet_weight(w))


def test_train_qema_by_hand():
    """The weight crosses −0.75 in step 1; the average, 0.75·(−0.8) + 0.25·(−0.7) = −0.775, stays below it."""
    training = references.train_qema(
        matrix(4.0, -0.8),
        lambda w, state: matrix(0.0, -0.1),
        steps=2,
        optimizer=partial(references.sgd, lr=1.0),
        beta=0.75,
    )
    np.testing.assert_allclose([w[0, 1] for w in training.weights], [-0.7, -0.6])
    np.testing.assert_allclose([e[0, 1] for e in training.averages], [-0.775, 0.75 * -0.775 - 0.15])
    assert [f[0, 1] for f in training.forward_weights] == [-1.0, -1.0]
    training = references.train_qema(
        matrix(4.0, -0.8), lambda w, state: matrix(0.0, -0.1), 3, partial(references.sgd, lr=1.0), start_after=2
    )
    assert [f[0, 1] for f in training.forward_weights] == [-1.0, -0.5, -1.0]


# Dampen


def test_dampen_schedule():
    assert [references.half_cosine(t, 8, 0.25) for t in (1, 2, 8, 9)] == [0.0, 0.0, 1.0, 1.0]
    assert references.half_cosine(5, 8, 0.25) == pytest.approx(0.5)
    assert references.half_cosine(1, 2, 0.0) == pytest.approx(0.5)


def test_train_dampen_by_hand():
    """λ = 0.25 and lr 1 halve the distance to the grid at each step: 1.4, 1.2, 1.1."""
    optimizer = partial(references.sgd, lr=1.0)
    weights = references.train_dampen(matrix(1.4), scripted(0, 0), 2, optimizer, strength=0.25, quantize=round_half_up)
    np.testing.assert_allclose(weights, [matrix(1.2), matrix(1.1)])
    weights = references.train_dampen(
        matrix(1.4), scripted(0, 0), 2, optimizer, strength=0.25, total_steps=2, start=0.5, quantize=round_half_up
    )
    np.testing.assert_allclose(weights, [matrix(1.4), matrix(1.2)])


# Freeze


def test_train_freeze_by_hand():
    """Quantized values 0 | 1 0 1: flips back at steps 2 and 3, f = 0, 0.5, 0.75 > 0.6, frozen at q̄ = 0.25."""
    options = {"momentum": 0.5, "threshold": 0.6, "quantize": round_half_up}
    optimizer = partial(references.sgd, lr=1.0)
    training = references.train_freeze(matrix(0.4), scripted(-0.2, 0.2, -0.2, -5, 7), 5, optimizer, **options)
    np.testing.assert_allclose(np.ravel(training.weights), [0.6, 0.4, 0.25, 0.25, 0.25])
    np.testing.assert_allclose(np.ravel(training.frequencies)[:3], [0.0, 0.5, 0.75])
    np.testing.assert_allclose(np.ravel(training.means), [0.5, 0.25, 0.25, 0.25, 0.25])
    assert np.ravel(training.frozen).tolist() == [False, False, True, True, True]
    # Changes in one direction are no oscillation; a step without a change keeps the direction of the last change.
    training = references.train_freeze(matrix(0.4), scripted(-1, -1, 0, 0, 1), 5, optimizer, **options)
    np.testing.assert_allclose(np.ravel(training.frequencies), [0, 0, 0, 0, 0.5])


def test_freeze_threshold():
    threshold = partial(references.freeze_threshold, threshold=0.1, final_threshold=0.01, total_steps=8, start=0.25)
    assert threshold(1) == math.inf
    assert [threshold(t) for t in (2, 5, 8, 20)] == pytest.approx([0.1, 0.055, 0.01, 0.01])
    assert references.freeze_threshold(1, 0.3, None, None, 0.5) == 0.3


# Q-Ramping


def test_ramping_factors():
    """TJ Alg. 2 with k1 = 16, k2 = 5: N jumps at R = 16, and N_max bounds it."""
    ratio = matrix(0, 15.9, 16, 17, 33, math.inf)
    assert references.ramping_factor(ratio, 1000).tolist() == [[1, 1, 6, 6, 11, 1000]]
    assert references.ramping_factor(ratio, 8).tolist() == [[1, 1, 6, 6, 8, 8]]
    ratio = references.oscillation_ratio(matrix(0, 1, 2, 0), matrix(0, 0, 4, 3))
    assert ratio.tolist() == [[0, math.inf, 0.5, 0]]


@pytest.mark.parametrize("restore", [False, True])
def test_train_qramping_by_hand(restore):
    """distQ = 2, distW = 0.04, R = 50, N = 1·3 + 1 = 4: the fourth step moves by 4·mean(0.1, 0.1, 0.1, 0.3) = 0.6."""
    training = references.train_qramping(
        matrix(0.49),
        scripted(-0.02, 0.02, 0.1, 0.1, 0.1, 0.3, 0.1, 0.0, 0.0),
        9,
        partial(references.sgd, lr=1.0),
        t_update=7,
        t0=2,
        k2=1,
        n_max=10,
        restore=restore,
        quantize=round_half_up,
    )
    np.testing.assert_allclose(training.ratios, [matrix(50), matrix(0)])
    assert [n.item() for n in training.factors] == [4, 1]
    np.testing.assert_allclose(
        np.ravel(training.weights), [0.51, 0.49, 0.49, 0.49, 0.49, -0.11, -0.11, -0.11, -0.11], rtol=1e-12
    )


def test_qramping_keeps_the_moments_of_waiting_elements():
    """One element has N = 2, the other N = 1 and moves as under the plain optimizer."""
    w0, g = matrix(0.49, 3.0), matrix(0.5, 0.5)
    states: list[dict] = []

    def optimizer(w: Array, g: Array, state: State) -> Array:
        states.append(dict(state))
        return references.adamw(w, g, state, lr=0.02, weight_decay=0.1)

    def gradient(w: Array, state: State) -> Array:
        return matrix(-0.5, 0.5) if state["step"] == 1 else g

    training = references.train_qramping(
        w0, gradient, 4, optimizer, t_update=10, t0=2, k2=1, n_max=2, quantize=round_half_up
    )
    assert training.factors[0].tolist() == [[2, 1]]
    assert states[3]["step"] == 3  # advances while the element waits
    assert states[3]["m"][0, 0] == states[2]["m"][0, 0]
    assert states[3]["m"][0, 1] != states[2]["m"][0, 1]
    plain, w = {}, w0
    for step in range(1, 5):
        w = references.adamw(w, gradient(w, {"step": step}), plain, lr=0.02, weight_decay=0.1)
        assert training.weights[step - 1][0, 1] == w[0, 1]
    # The waiting element's step, with the moments of step 2 and the step count 4, doubled.
    before, state = training.weights[1], dict(states[2], step=3)
    after = references.adamw(before, g, state, lr=0.02, weight_decay=0.1)
    assert training.weights[2][0, 0] == before[0, 0]
    np.testing.assert_allclose(training.weights[3][0, 0], (before + 2 * (after - before))[0, 0], rtol=1e-14)


def test_qramping_drops_or_keeps_gradients_collected_before_a_detection():
    """Two gradients are collected when the second detection finds N = 4 again; an element steps after four, old ones
    included if they are kept."""
    arguments = (matrix(0.49), scripted(-0.02, 0.02, 0.1, 0.3, -0.02, 0.02, 0.1, 0.3, 0.0, 0.0), 10)
    options = {"t0": 2, "k2": 1, "n_max": 4, "quantize": round_half_up}
    optimizer = partial(references.sgd, lr=1.0)
    drop = references.train_qramping(*arguments, optimizer, t_update=4, **options)
    keep = references.train_qramping(*arguments, optimizer, t_update=4, keep_pending=True, **options)
    assert np.ravel(drop.weights)[7] == pytest.approx(0.49)
    assert np.ravel(keep.weights)[7] == pytest.approx(0.49 - 0.8)


# StableSPAM


def test_stable_spam_conditioning_by_hand():
    """Gradients 1 and 10 of one element, with all averages written out."""
    state: State = {}
    g = references.stable_spam_condition(matrix(1.0), state, eps=0.0)
    np.testing.assert_allclose(g, matrix(1.0), rtol=1e-12)
    g = references.stable_spam_condition(matrix(10.0), state, eps=0.0)
    clipped = (0.999 * 0.001 * 1 + 0.001 * 10) / (1 - 0.999**2)  # 5.5023
    assert clipped == pytest.approx(5.50225, abs=1e-5)
    mean_norm = (0.7 * 0.3 + 0.3 * clipped) / (1 - 0.7**2)  # 3.6484
    mean_square = (0.9 * 0.1 + 0.1 * clipped**2) / (1 - 0.9**2)  # 16.408
    np.testing.assert_allclose(g, matrix(mean_norm / math.sqrt(mean_square)), rtol=1e-12)
    assert g.item() == pytest.approx(0.9007, abs=1e-4)


def test_stable_spam_normalizes_the_first_gradient_and_clips_entries_above_the_average_maximum():
    g = references.stable_spam_condition(matrix(3.0, -4.0), {}, eps=0.0)
    np.testing.assert_allclose(g, matrix(0.6, -0.8), rtol=1e-12)
    state: State = {"n": 1, "m_max": 0.001 * 4.0}
    m_max_hat = (0.999 * 0.004 + 0.001 * 40) / (1 - 0.999**2)
    g = references.stable_spam_condition(matrix(3.0, -40.0), state, eps=0.0)
    np.testing.assert_allclose(g[0, 1] / g[0, 0], -m_max_hat / 3, rtol=1e-12)


def test_stable_spam_leaves_weights_with_zero_gradients():
    weights = references.stable_spam(matrix(1.0, 2.0), [matrix(0.0, 0.0)] * 2)
    np.testing.assert_array_equal(weights, [matrix(1.0, 2.0)] * 2)


def test_stable_spam_resets_adam():
    """The step at a reset is Adam's first, lr·sign(g), although all earlier gradients had the other sign."""
    grads = [matrix(1.0, 1.0)] * 3 + [matrix(-1.0, -2.0)]
    weights = references.stable_spam(matrix(0.0, 0.0), grads, lr=0.1, eps=1e-15, reset_interval=4)
    np.testing.assert_allclose(weights[3] - weights[2], matrix(0.1, 0.1), rtol=1e-9)
    weights = references.stable_spam(matrix(0.0, 0.0), grads, lr=0.1, eps=1e-15, reset_interval=None)
    assert np.all(weights[3] < weights[2])


def test_stable_spam_cosine():
    cosine = references.stable_spam_cosine
    assert cosine(3, None) == 1
    assert [cosine(t, 3) for t in (2, 4, 5, 100)] == pytest.approx([0.75, 0.5, 0.5, 0.5])
    assert [cosine(t, 4, upstream_period=False) for t in (2, 4, 5, 100)] == pytest.approx([0.75, 0.5, 0.5, 0.5])


def test_stable_spam_on_adamw_equals_the_optimizer():
    rng = np.random.default_rng(2)
    w0, grads = rng.standard_normal((3, 4)), list(rng.standard_normal((12, 3, 4)))
    options = {"lr": 0.01, "weight_decay": 0.1, "total_steps": 8, "reset_interval": 5}
    optimizer = references.stable_spam(w0, grads, **options)
    technique = references.stable_spam_conditioned_adam(w0, grads, **options)
    np.testing.assert_allclose(technique, optimizer, rtol=1e-13)
    adam = references.stable_spam_conditioned_adam(w0, grads, decoupled=False, **options)
    assert not np.allclose(adam[-1], technique[-1])


def test_stable_spam_on_adam_equals_torchs_adam_on_conditioned_gradients():
    rng = np.random.default_rng(3)
    w0, grads = rng.standard_normal((2, 3)), list(rng.standard_normal((6, 2, 3)))
    options = {"lr": 0.01, "weight_decay": 0.1}
    weights = references.stable_spam_conditioned_adam(w0, grads, decoupled=False, total_steps=4, **options)
    p = torch.nn.Parameter(torch.from_numpy(w0.copy()))
    adam, state = torch.optim.Adam([p], **options), {}
    for step, g in enumerate(grads, start=1):
        c = references.stable_spam_cosine(step, 4)
        adam.param_groups[0]["betas"] = (0.9 * c, 0.999)
        p.grad = torch.from_numpy(references.stable_spam_condition(g, state, c=c))
        adam.step()
        np.testing.assert_allclose(weights[step - 1], p.detach().numpy(), rtol=1e-12)
