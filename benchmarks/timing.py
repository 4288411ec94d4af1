"""Times two functions in alternation, so that other load on the machine slows both."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Pair = tuple[float, float]  # seconds of one call of the baseline and of the function


@dataclass(frozen=True)
class Patience:
    """Limits of a comparison, which ends when its ratio is settled."""

    seconds: float = 60.0  # after which no further pair is begun
    least: int = 11  # pairs
    most: int = 201
    within: float = 0.03  # of the median are both quartiles of a settled ratio


@dataclass(frozen=True)
class Comparison:
    """Times of a function and of its baseline, in the order of measurement."""

    pairs: tuple[Pair, ...]
    patience: Patience = Patience()

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of the pairs' ratios."""
        low, middle, high = np.quantile([seconds / base for base, seconds in self.pairs], (0.25, 0.5, 0.75)).tolist()
        return low, middle, high

    @property
    def settled(self) -> bool:
        """True if there are enough pairs, and the quartiles of their ratio are close enough to its median."""
        low, middle, high = self.quartiles
        close = max(high - middle, middle - low) <= self.patience.within * middle
        return close and len(self.pairs) >= self.patience.least

    @property
    def figures(self) -> dict[str, Any]:
        """The comparison as plain data, in seconds, with every pair."""
        low, middle, high = self.quartiles
        return {
            "ratio": middle,
            "quartiles": [low, high],
            "repeats": len(self.pairs),
            "settled": self.settled,
            "baseline_seconds": self.baseline,
            "seconds": self.seconds,
            "pairs": [list(pair) for pair in self.pairs],
        }

    @property
    def baseline(self) -> float:
        """Median seconds of the baseline."""
        return statistics.median(base for base, _ in self.pairs)

    @property
    def seconds(self) -> float:
        """Median seconds of the function."""
        return statistics.median(seconds for _, seconds in self.pairs)


def alternate(baseline: Callable[[], float], function: Callable[[], float], patience: Patience) -> Comparison:
    """Call baseline, function, baseline, function, ..., which return the seconds they took, and compare their times."""
    end = time.perf_counter() + patience.seconds
    pairs: list[Pair] = []
    while True:
        pairs.append((baseline(), function()))
        comparison = Comparison(tuple(pairs), patience)
        if comparison.settled or len(pairs) >= patience.most or time.perf_counter() > end:
            return comparison


def compare(
    baseline: Callable[[], object],
    function: Callable[[], object],
    device: torch.device,
    patience: Patience,
    *,
    warm_up: int = 3,
    sample: float = 0.02,
) -> Comparison:
    """Time ``function`` beside ``baseline``. Both are first called ``warm_up`` times, which compiles them.

    A call shorter than ``sample`` seconds is repeated for that time in one measurement.
    """
    first, second = (_timed(call, device, warm_up, sample) for call in (baseline, function))
    return alternate(first, second, patience)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Return the median seconds of one call, without a baseline."""
    timed = _timed(call, device, warm_up=3, sample=0.02)
    return statistics.median(timed() for _ in range(repeats))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished, so that the clock measures its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _timed(call: Callable[[], object], device: torch.device, warm_up: int, sample: float) -> Callable[[], float]:
    def run(times: int) -> float:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(times):
            call()
        synchronize(device)
        return (time.perf_counter() - begin) / times

    for _ in range(warm_up):
        run(1)
    times = max(1, math.ceil(sample / max(run(1), 1e-9)))
    return lambda: run(times)
