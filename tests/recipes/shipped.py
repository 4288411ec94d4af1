"""The shipped policies beside their references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fp4graph_policies
import numpy as np

from fp4graph import Policy
from tests.recipes import mx_references, newest_references, other_references
from tests.recipes.bits import SiteBits
from tests.recipes.linear import SITE, Data, mismatches, run

POLICIES = sorted(path.stem for path in Path(fp4graph_policies.__path__[0]).glob("*.yaml"))
REFERENCES = {**mx_references.REFERENCES, **other_references.REFERENCES, **newest_references.REFERENCES}
REFERENCES["bf16"] = lambda x, w, dy, draw: (x @ w.T, dy @ w, dy.T @ x)
#: Signs of a random Hadamard, where they are not 32.
_SIGNS = {"mxfp4-rht-sr": 64, "quartet-ii": 128, "tetrajet-v2": 16, "ufp4": 16}
#: Policies that rotate as nvfp4-te does: in blocks of 16, with signs that never change.
_AS_NVIDIA = (
    "if4", "mxfp8-nvfp4", "nvint4", "nvfp4-te", "nvfp4-te-last-blocks", "nvfp4-te-bf16", "nvfp4-te-bf16-fprop"
)  # fmt: skip
#: Policies that rotate, whose numbers lie next to thresholds more often than others' (see :func:`expected`).
ROTATING = (
    "mxfp4-best", "mxfp4-full-hadamard", "mxfp4-full-rht", "mxfp4-rht-sr", "quartet", "quartet-ii", "tetrajet-v2",
    "ufp4", *_AS_NVIDIA,
)  # fmt: skip
#: The first element of x, w and dy of the data with ties, where it is not what makes γ a power of two for 448.
_PEAKS = {
    "nvfp4-te-4over6": (12.0, 12.0, 10.5),
    "nvfp4-rl": (12.0, 12.0, 10.5),
    "quartet-ii": (12.0, 12.0, 12.0),
    "nvint4": (12.25, 12.25, 12.25),
    "int4-per-tensor": None,
    "fp8-block": None,
}
#: The largest number of the data with ties, where it is not E2M1's: Qmax of the element is a power of two times it.
_LARGEST = {"int4-per-tensor": 7.0, "mxfp8": 7.0, "fp8-block": 7.0}
#: Policies with a γ for less than a tensor: the data with ties have a peak in every run of 128.
_PEAK_IN_EVERY_RUN = ("tetrajet-v2", "nvfp4-rl", "nvfp4-mxfp8-experts")
#: The largest number that mxfp4-rl's noise adds to a weight: six standard deviations.
_NOISE = {"mxfp4-rl": 6 * 1e-2}


def bits(policy: str, forward: int = 0) -> SiteBits:
    """What the site under ``policy`` draws."""
    constant = _shipped(policy) in _AS_NVIDIA
    return SiteBits(SITE, forward, signs_per_block=_signs(policy), constant_signs=constant)


def _shipped(form: str) -> str:
    """The policy that a form of :func:`forms` is one of."""
    return form.split("@")[0]


def _signs(form: str) -> int:
    policy = _shipped(form)
    return 16 if policy in _AS_NVIDIA else _SIGNS.get(policy, 32)


def data_for(policy: str) -> dict[str, Data]:
    """Data that tell a recipe from others: all magnitudes, all ties, and scales that underflow where those miss it."""
    peaks, every = _PEAKS.get(policy, (10.5, 10.5, 10.5)), 128 if policy in _PEAK_IN_EVERY_RUN else None
    ties = Data.grid(1, _LARGEST.get(policy, 6.0), peaks, every)
    return {"magnitudes": Data.wide(0), "ties": ties} | ({"large": Data.large(2)} if policy == "ue5m3" else {})


def forms(policy: Policy) -> dict[str, Policy]:
    """By the name of its reference, what a shipped policy is at first and what it becomes, phase by phase.

    A policy for experts is tried at them, and at a linear beside them.
    """
    numbered = enumerate(policy.phases, 1)
    phases = {f"{policy.name}@phase{number if number > 1 else ''}": phase.policy for number, phase in numbered}
    beside = {f"{policy.name}@linear": policy} if policy.name.endswith("-experts") else {}
    return {policy.name: policy, **phases, **beside}


def experts_at(form: str) -> int | None:
    """The block whose linear is an expert where a form is tried: the middle one, which is compared, or the first."""
    return (0 if form.endswith("@linear") else 1) if _shipped(form).endswith("-experts") else None


def expected(policy: str, data: Data) -> list[tuple[np.ndarray, ...]]:
    """(y, dx, dw) by the reference of ``policy``.

    A rotation divides by √g. In fp32 its results are off by an ulp or so, and where exact arithmetic gives a power of
    two or a midpoint, as it often does after two rotations, that decides how a block is scaled or an element rounded.
    So for policies that rotate these are several, with every rotated number moved at random, by up to two ulps of its
    block's largest.
    """
    reference = REFERENCES[policy]
    found = [reference(data.x, data.w, data.dy, bits(policy))]
    for seed in range(40 if _shipped(policy) in ROTATING else 0):
        with _moved_rotations(seed):
            found.append(reference(data.x, data.w, data.dy, bits(policy)))
    return found


def differences(form: str, given: Any, data: Data, references: list[tuple[np.ndarray, ...]]) -> list[str]:
    """How training under ``given`` differs from ``references``, those of a form of a shipped policy."""
    return differences_of(_shipped(form), run(given, data, experts_at(form)), data, references)


def differences_of(
    policy: str, got: tuple[np.ndarray, ...], data: Data, references: list[tuple[np.ndarray, ...]]
) -> list[str]:
    """How what a training step gave differs from ``references``, those of the shipped ``policy``."""
    block = _signs(policy) if policy in ROTATING else 1
    parts = None
    if policy == "averis":  # means of tokens are far larger than tokens that are small
        x, dy = (np.abs(a) + np.abs(a.mean(0)) for a in (data.x, data.dy))
        parts = Data(x, data.w, dy)
    return mismatches(got, references, data, added=_NOISE.get(policy, 0.0), rotated=block, parts=parts)


@contextmanager
def _moved_rotations(seed: int) -> Iterator[None]:
    generator = np.random.default_rng(seed)

    def moving(rotate: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        def moved(x: np.ndarray, axis: int, block: int, *signs: Any, **options: Any) -> np.ndarray:
            exact = np.moveaxis(rotate(x, axis, block, *signs, **options), axis, -1)
            blocks = exact.reshape(*exact.shape[:-1], -1, block)
            ulp = 2.0**-23 * np.abs(blocks).max(-1, keepdims=True)
            blocks = blocks + 2 * ulp * generator.uniform(-1, 1, blocks.shape)
            return np.moveaxis(blocks.reshape(exact.shape), -1, axis)

        return moved

    former = [(module, module.rotate) for module in (mx_references, other_references)]
    try:
        for module, rotate in former:
            module.rotate = moving(rotate)
        yield
    finally:
        for module, rotate in former:
            module.rotate = rotate
