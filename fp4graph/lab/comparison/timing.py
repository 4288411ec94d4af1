"""Times two trainings in alternation, so that what else the machine does slows both down alike."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from statistics import median

import torch

from fp4graph.lab.comparison.training import Log, Stop, Train, call, seeded
from fp4graph.policy import Policy

#: Logged intervals of the first turn, which compile and fill caches; and of a turn, whose first one is left out.
WARM_UP, INTERVALS = 5, 4
#: The turns of each training, fewer where they take longer than so many seconds.
TURNS, SECONDS = 9, 120.0


def timed(train: Train, baseline: Policy, policy: Policy, seed: int) -> dict[str, float]:
    """Return the baseline's ms per step, and the ratio of the policy's; empty where the training is too short.

    The trainings run in two threads, of which only one is awake: they hand over to each other inside ``log``. They end
    after :data:`TURNS` turns, or with the shorter training. Times are medians over the turns, and the ratio that of the
    turns' ratios.

    Raises:
        Exception: what a training raises.
    """
    pair = _Turns(train, baseline, seed), _Turns(train, policy, seed)
    with seeded(seed):
        for turns, other in zip(pair, reversed(pair), strict=True):
            turns.other = other
            turns.start()
        pair[0].awake.set()
        try:
            for turns in pair:
                turns.join()
        finally:
            for turns in pair:  # after a Ctrl-C: at the next call of log
                turns.ends = True
                turns.awake.set()
    for turns in pair:
        if turns.error is not None:
            raise turns.error
    turns_of = list(zip(pair[0].seconds, pair[1].seconds, strict=False))
    if not turns_of:
        return {}
    return {
        "baseline_ms_per_step": 1000 * median(usual for usual, _ in turns_of),
        "ratio": median(own / usual for usual, own in turns_of),
    }


class _Turns(threading.Thread):
    """A training that sleeps while the other one has its turn."""

    other: _Turns

    def __init__(self, train: Train, policy: Policy, seed: int) -> None:
        super().__init__(daemon=True)
        self._train, self._policy, self._seed = train, policy, seed
        self.awake, self.ends = threading.Event(), False
        self.seconds: list[float] = []
        self.error: Exception | None = None
        self._intervals: list[float] = []
        self._warm = False
        self._last: tuple[int, float] | None = None
        self._began = time.monotonic()

    def run(self) -> None:
        self.awake.wait()
        try:
            if not self.ends:
                with tempfile.TemporaryDirectory() as folder:
                    torch.manual_seed(self._seed)
                    call(self._train, self._policy, self._seed, Log(Path(folder), self._look))
        except Stop:
            pass
        except Exception as error:  # noqa: BLE001  # raised again by timed()
            self.error = error
        finally:
            self.ends = self.other.ends = True
            self.other.awake.set()

    def _look(self, step: int, loss: float | None) -> None:
        """Take the time of a step; hand over where the turn has ended."""
        if self._last is not None and step <= self._last[0]:
            return  # a validation, or the loss of a step whose end is known
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        now = time.perf_counter()
        if self._last is not None:
            self._intervals.append((now - self._last[1]) / (step - self._last[0]))
        self._last = step, now
        if len(self._intervals) == (INTERVALS if self._warm else WARM_UP):
            if self._warm:
                self.seconds.append(median(self._intervals[1:]))
            self._warm, self._intervals = True, []
            self._hand_over()
            self._last = step, time.perf_counter()
        if self.ends:
            raise Stop

    def _hand_over(self) -> None:
        late = time.monotonic() - self._began > SECONDS
        if len(self.other.seconds) == len(self.seconds) >= (1 if late else TURNS):
            self.ends = self.other.ends = True
        self.awake.clear()
        self.other.awake.set()
        if not self.ends:
            self.awake.wait()
