"""Two functions timed by turns, so that whatever else the machine does weighs on both."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Pair = tuple[float, float]


@dataclass(frozen=True)
class Patience:
    """How long a comparison goes on: until its ratio is settled, but no longer than this.

    Attributes:
        seconds: after which no further pair is begun. least, most: pairs.
        within: settled is a ratio whose quartiles both lie this close to the median, as a share of it.
    """

    seconds: float = 60.0
    least: int = 11
    most: int = 201
    within: float = 0.03


@dataclass(frozen=True)
class Comparison:
    """Times of a function beside those of another, its baseline.

    Attributes:
        pairs: (baseline, function), in seconds for one call, in the order they were measured.
        patience: that decided how many there are.
    """

    pairs: tuple[Pair, ...]
    patience: Patience = Patience()

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """First quartile, median and third quartile of the ratio of each pair."""
        return quartiles([own / base for base, own in self.pairs])

    @property
    def settled(self) -> bool:
        """Whether there are enough pairs, and the quartiles of their ratio are close enough to its median."""
        low, middle, high = self.quartiles
        return (
            len(self.pairs) >= self.patience.least and max(high - middle, middle - low) <= self.patience.within * middle
        )

    @property
    def baseline(self) -> float:
        """Median seconds of the baseline."""
        return statistics.median(base for base, _ in self.pairs)

    @property
    def seconds(self) -> float:
        """Median seconds of the function."""
        return statistics.median(own for _, own in self.pairs)


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile, interpolated between neighbours; of one value, that value."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def alternate(baseline: Callable[[], float], function: Callable[[], float], patience: Patience) -> Comparison:
    """Baseline, function, baseline, function, ...: each returns the seconds it took."""
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
    """Time ``function`` beside ``baseline``, both called ``warm_up`` times before, which compiles them.

    A call much shorter than ``sample`` seconds is repeated that long for one measurement.
    """
    first, second = (_timed(call, device, warm_up, sample) for call in (baseline, function))
    return alternate(first, second, patience)


def seconds_of(call: Callable[[], object], device: torch.device, repeats: int = 15) -> float:
    """Median seconds of one call by itself, for what there is nothing to compare with."""
    timed = _timed(call, device, warm_up=3, sample=0.02)
    return statistics.median(timed() for _ in range(repeats))


def synchronize(device: torch.device) -> None:
    """Wait for the device, so that a clock means something."""
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
