"""osci_reset against the authors' rule in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.training import applied, prepared
from tests.recipes.arithmetic import quantize

OPTIONS = {"start": 3, "every": 8, "track": 4, "threshold": 3.0}
STEPS = 20


def nvfp4(w: np.ndarray) -> np.ndarray:
    return quantize(w, 1, block=16, fmt="e4m3", rule="nearest_even")


def gradients(number: int) -> np.ndarray:
    """Return gradients of alternating sign, under which weights swing to and fro and a few cross a threshold."""
    generator = np.random.default_rng(number)
    swing = 0.04 * (-1) ** number * np.random.default_rng(99).random((8, 32))
    return (swing + 0.002 * generator.standard_normal((8, 32))).astype(np.float32).astype(np.float64)


def reference(w: np.ndarray, absolute: bool = False) -> tuple[list[np.ndarray], list[int]]:
    """Return the weights after each step of SGD with rate 1, and the number of elements that each step resets.

    TetraJet-v2's calibrate.py, detect_type distance_ratio: with n the number of the step just done, n % every == 0
    takes a snapshot, the next `track` steps sum |dW| and |dQ(W)|, and the one after sets W to Q(W) where the ratio of
    the sums is at least the threshold, 0 where W did not move. Steps count from `start`, or with `absolute` from 0, as
    in that file; tracking begins with the first snapshot at `start` or later.
    """
    weights, resets, last, d, dq = [], [], w, np.zeros_like(w), np.zeros_like(w)
    for n in range(1, STEPS + 1):
        w = (w - gradients(n)).astype(np.float32).astype(np.float64)
        reset, first = 0, OPTIONS["start"]
        while absolute and first % OPTIONS["every"]:
            first += 1
        if n >= first:
            place = (n - first) % OPTIONS["every"]
            if place == 0:
                last, d, dq = w, np.zeros_like(w), np.zeros_like(w)
            elif place <= OPTIONS["track"]:
                d, dq, last = d + np.abs(w - last), dq + np.abs(nvfp4(w) - nvfp4(last)), w
            elif place == OPTIONS["track"] + 1:
                beyond = np.where(d > 0, dq / np.where(d > 0, d, 1), 0) >= OPTIONS["threshold"]
                w, reset = np.where(beyond, nvfp4(w), w), int(beyond.sum())
        weights.append(w)
        resets.append(reset)
    return weights, resets


def trained(options: dict[str, object]) -> list[np.ndarray]:
    """Return the weights at the start and after each step."""
    torch.manual_seed(0)
    model = applied(nn.Sequential(nn.Linear(32, 8, bias=False)), one_rule({"osci_reset": options}, quantize=NVFP4))
    optimizer = prepared(model, torch.optim.SGD, lr=1.0)
    weights = [model[0].weight.detach().double().numpy().copy()]
    for number in range(1, STEPS + 1):
        model(torch.ones(1, 32))  # a training forward
        model[0].weight.grad = torch.from_numpy(gradients(number)).float()
        optimizer.step()
        weights.append(model[0].weight.detach().double().numpy().copy())
    return weights


@pytest.mark.slow
@pytest.mark.parametrize(("absolute", "steps"), [(False, [3 + 5, 3 + 8 + 5]), (True, [8 + 5])])
def test_weights_are_those_of_the_rule(absolute: bool, steps: list[int]) -> None:
    start, *weights = trained({**OPTIONS, "absolute_steps": absolute})
    expected, resets = reference(start, absolute)
    assert [n for n, reset in enumerate(resets, 1) if reset] == steps
    assert 0 < resets[steps[0] - 1] < start.size / 2
    # Resets are to NVFP4 in fp32 here, and in float64 in the reference.
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-6)
