"""The shipped policies with their references, the data on which they are compared, and the comparison."""

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
#: The number of signs of a random Hadamard, if it is not 32.
_SIGNS = {"mxfp4-rht-sr": 64, "quartet-ii": 128, "tetrajet-v2": 16, "ufp4": 16}
#: Policies that rotate as nvfp4-te does: in blocks of 16, with the same signs in every forward.
_AS_NVIDIA = (
    "if4", "mxfp8-nvfp4", "nvint4", "nvfp4-te", "nvfp4-te-last-blocks", "nvfp4-te-bf16", "nvfp4-te-bf16-fprop"
)  # fmt: skip
#: Policies whose rotated numbers often lie next to thresholds (see :func:`expected`). ufp4 rotates, too, but its scales
#: are not rounded and its results are not rotated back.
ROTATING = (
    "mxfp4-best", "mxfp4-full-hadamard", "mxfp4-full-rht", "mxfp4-rht-sr", "quartet", "quartet-ii", "tetrajet-v2",
    *_AS_NVIDIA,
)  # fmt: skip
#: The first elements of x, w and dy in the data with ties, if γ is a power of two for other elements than 10.5.
_PEAKS = {
    "nvfp4-te-4over6": (12.0, 12.0, 10.5),
    "nvfp4-rl": (12.0, 12.0, 10.5),
    "quartet-ii": (12.0, 12.0, 12.0),
    "nvint4": (12.25, 12.25, 12.25),
    "int4-per-tensor": None,
    "fp8-block": None,
}
#: The largest number of the data with ties, if it is not 6. The element's Qmax is a power of two times this number.
_LARGEST = {"int4-per-tensor": 7.0, "mxfp8": 7.0, "fp8-block": 7.0}
#: Policies with a γ for each row or run of 128: the data with ties have a peak in every run of 128.
_PEAK_IN_EVERY_RUN = ("tetrajet-v2", "nvfp4-rl", "nvfp4-mxfp8-experts")
#: The largest number that noise adds to a weight: six standard deviations.
_NOISE = {"mxfp4-rl": 6 * 1e-2}


def bits(policy: str, forward: int = 0) -> SiteBits:
    """Return the random numbers of the site under ``policy``."""
    constant = _shipped(policy) in _AS_NVIDIA
    return SiteBits(SITE, forward, signs_per_block=_signs(policy), constant_signs=constant)


def _shipped(form: str) -> str:
    """Return the name of the shipped policy that has this form (see :func:`forms`)."""
    return form.split("@")[0]


def _signs(form: str) -> int:
    policy = _shipped(form)
    return 16 if policy in _AS_NVIDIA else _SIGNS.get(policy, 32)


def data_for(policy: str) -> dict[str, Data]:
    """Return data that distinguish recipes: all magnitudes, all ties and, for ue5m3, encode scales that underflow."""
    peaks, every = _PEAKS.get(policy, (10.5, 10.5, 10.5)), 128 if policy in _PEAK_IN_EVERY_RUN else None
    ties = Data.grid(1, _LARGEST.get(policy, 6.0), peaks, every)
    return {"magnitudes": Data.wide(0), "ties": ties} | ({"large": Data.large(2)} if policy == "ue5m3" else {})


def forms(policy: Policy) -> dict[str, Policy]:
    """Return the forms of a shipped policy by the names of their references: the policy before its phases, and in each.

    A policy for experts has another form, the policy at a linear beside experts.
    """
    numbered = enumerate(policy.phases, 1)
    phases = {f"{policy.name}@phase{number if number > 1 else ''}": phase.policy for number, phase in numbered}
    beside = {f"{policy.name}@linear": policy} if policy.name.endswith("-experts") else {}
    return {policy.name: policy, **phases, **beside}


def experts_at(form: str) -> int | None:
    """Return the block with an expert: the middle block, which is compared, or the first beside a linear; or None."""
    return (0 if form.endswith("@linear") else 1) if _shipped(form).endswith("-experts") else None


def expected(policy: str, data: Data) -> list[tuple[np.ndarray, ...]]:
    """Return (y, dx, dw) by the reference of ``policy``, in several versions for the policies of :data:`ROTATING`.

    A rotation divides by √g, so that its fp32 results are off by about an ulp. Exact arithmetic often gives a power of
    two or a midpoint after two rotations; there an ulp decides how a block is scaled or an element rounded. Further
    versions therefore move every rotated number at random, by up to two ulps of the largest number of its block.
    """
    reference = REFERENCES[policy]
    versions = [reference(data.x, data.w, data.dy, bits(policy))]
    for seed in range(40 if _shipped(policy) in ROTATING else 0):
        with _moved_rotations(seed):
            versions.append(reference(data.x, data.w, data.dy, bits(policy)))
    return versions


def differences(form: str, policy: Any, data: Data, references: list[tuple[np.ndarray, ...]]) -> list[str]:
    """Return how a training step under ``policy`` differs from ``references``, those of ``form``."""
    return differences_of(_shipped(form), run(policy, data, experts_at(form)), data, references)


def differences_of(
    policy: str, got: tuple[np.ndarray, ...], data: Data, references: list[tuple[np.ndarray, ...]]
) -> list[str]:
    """Return how the results ``got`` of a training step differ from ``references``, those of the shipped ``policy``."""
    block = _signs(policy) if policy in ROTATING else 1
    parts = None
    if policy == "averis":  # the mean over tokens is far larger than small tokens
        x, dy = (np.abs(a) + np.abs(a.mean(0)) for a in (data.x, data.dy))
        parts = Data(x, data.w, dy)
    return mismatches(got, references, data, added=_NOISE.get(policy, 0.0), rotated=block, parts=parts)


@contextmanager
def _moved_rotations(seed: int) -> Iterator[None]:
    """Move the results of the references' rotations at random (see :func:`expected`)."""
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
