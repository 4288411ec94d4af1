"""Times two trainings in alternation, so that other load on the machine slows both alike."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from statistics import median, quantiles

import torch

from fp4graph.lab.comparison.training import Log, Stop, Train, call, seeded
from fp4graph.policy import Policy

#: How many intervals the first turn logs, which compiles, and how many each later turn. No turn counts its first one.
WARM_UP, INTERVALS = 5, 4
#: The number of turns of each training, and the seconds after which no turn begins.
TURNS, SECONDS = 9, 120.0
#: The largest spread of ratios that are shown. A larger spread exceeds what most policies cost.
STEADY = 0.25


def timed(train: Train, baseline: Policy, policy: Policy, seed: int) -> dict[str, float]:
    """Return the baseline's ms per step, the ratio of the policy's time to it, and the spread of this ratio.

    The trainings run in two threads, which wait inside ``log`` for their turns. They end after :data:`TURNS` turns, or
    with the shorter training; if that is too short, the result is empty. Time and ratio are medians over the turns;
    ``spread`` is the interquartile range of the ratios divided by their median. A training's exception passes through.
    """
    pair = _Training(train, baseline, seed), _Training(train, policy, seed)
    turns: list[list[float]] = []
    with seeded(seed):
        try:
            began = time.monotonic()
            for count in (WARM_UP, *[INTERVALS] * TURNS):
                seconds = [turn for training in pair if (turn := training.turn(count)) is not None]
                if len(seconds) < len(pair):
                    break
                turns.append(seconds)
                if len(turns) > 1 and time.monotonic() - began > SECONDS:
                    break
        finally:
            for training in pair:
                training.end()
        for training in pair:
            training.join()
    if not (measured := turns[1:]):
        return {}
    ratios = [seconds / reference for reference, seconds in measured]
    low, middle, high = quantiles(ratios, method="inclusive") if len(ratios) > 1 else ratios * 3
    return {
        "baseline_ms_per_step": 1000 * median(reference for reference, _ in measured),
        "ratio": middle,
        "spread": (high - low) / middle,
    }


class _Training(threading.Thread):
    """A training that sleeps between its turns."""

    def __init__(self, train: Train, policy: Policy, seed: int) -> None:
        super().__init__(daemon=True)
        self._train, self._policy, self._seed = train, policy, seed
        self._asked, self._done = SimpleQueue[int](), SimpleQueue[float | BaseException | None]()
        self._ends, self._count = False, 0
        self._intervals: list[float] = []
        self._last: tuple[int, float] | None = None
        self._device = torch.get_default_device()
        self.start()

    def turn(self, count: int) -> float | None:
        """Let the training log ``count`` intervals; return their median in seconds per step, or None at its end."""
        self._asked.put(count)
        seconds = self._done.get()
        if isinstance(seconds, BaseException):
            raise seconds
        return seconds

    def end(self) -> None:
        """End the training: during a turn at the training's next call of ``log``, else at once."""
        self._ends = True
        self._asked.put(0)

    def run(self) -> None:
        self._count, error = self._asked.get(), None
        try:
            if not self._ends:
                if torch.get_default_device() != self._device:  # each thread has its own
                    torch.set_default_device(self._device)
                with tempfile.TemporaryDirectory() as folder:
                    torch.manual_seed(self._seed)
                    call(self._train, self._policy, self._seed, Log(Path(folder), self._look))
        except Stop:
            pass
        except BaseException as raised:  # noqa: BLE001  # raised again by turn(); sys.exit() too must end the wait
            error = raised
        self._done.put(error)

    def _look(self, step: int, loss: float | None) -> None:
        """Take the time of a step; sleep if the turn has ended."""
        if self._last is not None and step <= self._last[0]:
            return  # a validation, or the loss of a step that was timed by its tick
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if self._last is not None:
            self._intervals.append((now - self._last[1]) / (step - self._last[0]))
        self._last = step, now
        if len(self._intervals) == self._count:
            self._done.put(median(self._intervals[1:]))
            self._count, self._intervals = self._asked.get(), []
            self._last = step, time.perf_counter()
        if self._ends:
            raise Stop
