"""Recipes whose techniques act at the optimizer's step, by value: the weights after steps equal a reference's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import fp4graph
from tests.recipes import optimizer_references as references
from tests.recipes.linear import IN, OUT, TOKENS, Blocks
from tests.recipes.mx_references import tetrajet_qema
from tests.recipes.shipped import REFERENCES, bits

pytestmark = pytest.mark.slow

STEPS = 8
#: Options under which a technique acts within a few steps; the shipped ones of some begin after many.
QUICK: dict[str, dict[str, Any]] = {
    "tetrajet-qema": {"q_ema": {"beta": 0.5}},
    "tetrajet-qramping": {"q_ramping": {"t_update": 7, "n_max": 3, "t0": 3, "k1": 1, "k2": 1}},
    "tetrajet-dampen": {"dampen": {"strength": 3.0, "total_steps": 6, "start": 0.25}},
    "tetrajet-freeze": {
        "freeze": {"momentum": 0.5, "threshold": 0.6, "final_threshold": 0.3, "total_steps": 6, "start": 0.25}
    },
    "mxfp4-best": {"stable_spam": {"reset_interval": 3}},
}


def inputs() -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """w, and x and dy of every step: gradients of the size of the weights."""
    generator = np.random.default_rng(3)

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * scale).astype(np.float32).astype(np.float64)

    xs = [matrix(TOKENS, IN, 1.0) for _ in range(STEPS)]
    return matrix(OUT, IN, 1.0), xs, [matrix(TOKENS, OUT, TOKENS**-0.5) for _ in range(STEPS)]


def trained(policy: Any, make: Callable[..., torch.optim.Optimizer], steps: int) -> tuple[list, list]:
    """The middle block's output in each step, and its weight after it."""
    w, xs, dys = inputs()
    model = fp4graph.apply(Blocks(w), policy, backend="eager")
    weight = model.blocks[1].fc.weight
    optimizer = fp4graph.prepare_optimizer(model, make(model.parameters()))
    outputs, weights = [], []
    for x, dy in zip(xs[:steps], dys[:steps], strict=True):
        optimizer.zero_grad()
        y = model(torch.from_numpy(x).float())[0]
        y.backward(torch.from_numpy(dy).float())
        optimizer.step()
        outputs.append(y.detach().double().numpy())
        weights.append(weight.detach().double().numpy().copy())
    return outputs, weights


def gradient(policy: str) -> Callable[[np.ndarray, dict[str, Any]], np.ndarray]:
    """dW of the step that the references are in; no recipe here lets it depend on the weight."""
    w, xs, dys = inputs()

    def of(latent: np.ndarray, state: dict[str, Any]) -> np.ndarray:
        step = state["step"] - 1
        return REFERENCES[policy](xs[step], w, dys[step], bits(policy, step))[2]

    return of


def with_options(policy: str) -> dict[str, Any]:
    return {"version": 1, "extends": policy, "techniques": [QUICK[policy]]}


SGD = partial(torch.optim.SGD, lr=0.29)
CASES = {
    "shipped": (lambda policy: policy, 2, lambda policy: {}),
    "quick": (with_options, STEPS, lambda policy: next(iter(QUICK[policy].values()))),
}
#: What the shipped policies say, where it is not the references' default.
SHIPPED = {
    "tetrajet-qramping": {"t_update": 1251, "n_max": 1251},
    "tetrajet-dampen": {"total_steps": 112590, "start": 0.25},
    "tetrajet-freeze": {"threshold": 0.1, "final_threshold": 0.01, "total_steps": 112590, "start": 0.25},
}
TRAININGS: dict[str, Callable[..., Any]] = {
    "tetrajet-qema": references.train_qema,
    "tetrajet-qramping": references.train_qramping,
    "tetrajet-dampen": references.train_dampen,
    "tetrajet-freeze": references.train_freeze,
}


def close(got: list[np.ndarray], expected: list[np.ndarray]) -> None:
    """Every weight within what fp32 loses in so many steps of sums of 128 products of numbers of size 1."""
    for step, (mine, reference) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(mine, reference, rtol=0, atol=(step + 1) * 2e-5, err_msg=f"step {step + 1}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", TRAININGS)
def test_weights(policy: str, case: str) -> None:
    given, steps, options = CASES[case]
    w = inputs()[0]
    optimizer = partial(references.sgd, lr=0.29, momentum=0.0)
    settings = options(policy) or SHIPPED.get(policy, {})
    result = TRAININGS[policy](w, gradient("tetrajet"), steps, optimizer, **settings)
    expected = result if isinstance(result, list) else result.weights
    outputs, weights = trained(given(policy), SGD, steps)
    close(weights, expected)
    if policy == "tetrajet-qema":  # the only one whose forward is not that of its weight alone
        _, xs, dys = inputs()
        before, averages = [w, *expected[:-1]], [w, *result.averages[:-1]]
        for step in range(steps):
            y = tetrajet_qema(xs[step], before[step], dys[step], bits(policy, step), ema=averages[step])[0]
            np.testing.assert_allclose(outputs[step], y, rtol=0, atol=1e-3)  # K = 256 products, and fp32 weights


def test_the_quick_options_make_every_technique_act() -> None:
    """Else the test above would hold plain SGD to plain SGD."""
    w, plain = inputs()[0], trained("tetrajet", SGD, STEPS)
    optimizer = partial(references.sgd, lr=0.29, momentum=0.0)
    ramped = references.train_qramping(
        w, gradient("tetrajet"), STEPS, optimizer, **QUICK["tetrajet-qramping"]["q_ramping"]
    )
    assert (np.concatenate([factor.ravel() for factor in ramped.factors]) > 1).mean() > 0.1
    frozen = references.train_freeze(w, gradient("tetrajet"), STEPS, optimizer, **QUICK["tetrajet-freeze"]["freeze"])
    assert 0.05 < frozen.frozen[-1].mean() < 0.95
    for policy in ("tetrajet-qramping", "tetrajet-dampen", "tetrajet-freeze"):
        assert np.abs(trained(with_options(policy), SGD, STEPS)[1][-1] - plain[1][-1]).max() > 0.05
    q_ema = trained(with_options("tetrajet-qema"), SGD, STEPS)
    assert np.abs(q_ema[0][-1] - plain[0][-1]).max() > 0.5


@pytest.mark.parametrize(
    ("policy", "case"),
    [("mxfp4-best", "shipped"), ("nvfp4-best", "shipped"), ("ue5m3-best", "shipped"), ("mxfp4-best", "quick")],
)
def test_weights_under_stable_spam(policy: str, case: str) -> None:
    """ε of Adam is large, so that an update does not hang on the sign of a gradient near zero."""
    given, steps, options = CASES[case]
    settings = {"lr": 0.3, "betas": (0.9, 0.99), "weight_decay": 0.01}
    expected = references.stable_spam_conditioned_adam(
        inputs()[0],
        gradient(policy),
        steps=steps,
        adam_eps=0.1,
        **settings,
        **(options(policy) if case == "quick" else {}),
    )
    _, weights = trained(given(policy), partial(torch.optim.AdamW, eps=0.1, **settings), steps)
    close(weights, expected)
