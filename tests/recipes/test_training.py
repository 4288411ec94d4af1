"""Recipes whose techniques act at the optimizer's step: the weights after each step equal those of a reference."""

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
#: Options with which a technique acts within a few steps; with the shipped options some act only after many steps.
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
    """Return w, and x and dy of each step, whose dW is as large as w."""
    generator = np.random.default_rng(3)

    def matrix(rows: int, columns: int, scale: float) -> np.ndarray:
        return (generator.standard_normal((rows, columns)) * scale).astype(np.float32).astype(np.float64)

    xs = [matrix(TOKENS, IN, 1.0) for _ in range(STEPS)]
    return matrix(OUT, IN, 1.0), xs, [matrix(TOKENS, OUT, TOKENS**-0.5) for _ in range(STEPS)]


def trained(policy: Any, make: Callable[..., torch.optim.Optimizer], steps: int) -> tuple[list, list]:
    """Return the output of the middle block in each step, and its weight after each step."""
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
    """Return a function of the references that gives dW of a step; no recipe here lets dW depend on the weight."""
    w, xs, dys = inputs()

    def gradient_of_step(latent: np.ndarray, state: dict[str, Any]) -> np.ndarray:
        step = state["step"] - 1
        return REFERENCES[policy](xs[step], w, dys[step], bits(policy, step))[2]

    return gradient_of_step


def with_options(policy: str) -> dict[str, Any]:
    return {"version": 1, "extends": policy, "techniques": [QUICK[policy]]}


SGD, REFERENCE_SGD = partial(torch.optim.SGD, lr=0.29), partial(references.sgd, lr=0.29)
#: The policy that is trained, the number of steps, and the options of the reference.
CASES = {
    "shipped": (lambda policy: policy, 2, lambda policy: {}),
    "quick": (with_options, STEPS, lambda policy: next(iter(QUICK[policy].values()))),
}
#: Options of the shipped policies that are not defaults of the references.
SHIPPED = {
    "tetrajet-qramping": {"t_update": 1251, "n_max": 1221},
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
    """Compare weights within the error of fp32 after so many steps of sums of 128 products of numbers of size 1."""
    for step, (weight, reference) in enumerate(zip(got, expected, strict=True)):
        np.testing.assert_allclose(weight, reference, rtol=0, atol=(step + 1) * 2e-5, err_msg=f"step {step + 1}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", TRAININGS)
def test_weights(policy: str, case: str) -> None:
    variant, steps, options = CASES[case]
    w, xs, dys = inputs()
    settings = options(policy) or SHIPPED.get(policy, {})
    result = TRAININGS[policy](w, gradient("tetrajet"), steps, REFERENCE_SGD, **settings)
    expected = result if isinstance(result, list) else result.weights
    outputs, weights = trained(variant(policy), SGD, steps)
    close(weights, expected)
    if policy == "tetrajet-qema":  # the only recipe whose forward depends on more than its weight
        before, averages = [w, *expected[:-1]], [w, *result.averages[:-1]]
        for step in range(steps):
            y = tetrajet_qema(xs[step], before[step], dys[step], bits(policy, step), ema=averages[step])[0]
            np.testing.assert_allclose(outputs[step], y, rtol=0, atol=1e-3)  # K = 256 products, and fp32 weights


def test_the_quick_options_make_every_technique_act() -> None:
    """Otherwise ``test_weights`` would compare plain SGD with plain SGD."""
    plain, training = trained("tetrajet", SGD, STEPS), (inputs()[0], gradient("tetrajet"), STEPS, REFERENCE_SGD)
    ramped = references.train_qramping(*training, **QUICK["tetrajet-qramping"]["q_ramping"])
    assert (np.concatenate([factor.ravel() for factor in ramped.factors]) > 1).mean() > 0.1
    frozen = references.train_freeze(*training, **QUICK["tetrajet-freeze"]["freeze"])
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
    """Adam's ε is large, so that an update does not depend on the sign of a gradient near zero."""
    variant, steps, options = CASES[case]
    settings = {"lr": 0.3, "betas": (0.9, 0.99), "weight_decay": 0.01}
    expected = references.stable_spam_conditioned_adam(
        inputs()[0],
        gradient(policy),
        steps=steps,
        adam_eps=0.1,
        **settings,
        **(options(policy) if case == "quick" else {}),
    )
    _, weights = trained(variant(policy), partial(torch.optim.AdamW, eps=0.1, **settings), steps)
    close(weights, expected)
