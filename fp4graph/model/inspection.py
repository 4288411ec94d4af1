"""Observed forwards: they run without a compiler, with the noise and the effects of any other forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fp4graph.graph.observe import Observation, Recording
from fp4graph.graph.watch import Watch
from fp4graph.model.capture import Capture
from fp4graph.model.prepare import PhasePlan


class Inspection:
    """The observation of one phase's forwards: a search for NaN and Inf, or a recording of the sites.

    Calls that Dynamo does not compile run by ``uncompiled``, as they do unobserved; None refuses them.
    ``recording`` sees the sites of forwards with gradients if ``training`` is set, else of forwards without gradients.
    """

    def __init__(self, plan: PhasePlan, dynamic: bool | None, uncompiled: Callable[..., Any] | None) -> None:
        self._capture = partial(Capture, plan, dynamic=dynamic, uncompiled=uncompiled)
        self._names = plan.names
        self.recording: Recording | None = None
        self.training = True
        self._watched: Capture | None = None
        self._observed: tuple[Observation, Capture] | None = None

    @property
    def watching(self) -> bool:
        """Return whether a search for NaN and Inf is on."""
        return self._watched is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run forwards in this context, and their backwards, node by node; raise NonFiniteError at NaN or Inf."""
        watch = Watch(self._names)
        outer, self._watched = self._watched, self._capture(watch.backend)
        try:
            yield
        finally:
            self._watched = outer
            watch.close()

    def capture(self, *, training: bool, checked: bool) -> Capture | None:
        """Return the capture that runs an observed forward, or None. Recording begins once coverage is ``checked``."""
        if self._watched is not None:
            return self._watched
        recording = self.shown(training=training, checked=checked)
        if recording is None:
            return None
        if self._observed is None:
            observation = Observation(recording)
            self._observed = observation, self._capture(observation.backend)
        observation, capture = self._observed
        observation.recording = recording
        return capture

    def shown(self, *, training: bool, checked: bool) -> Recording | None:
        """Return the recording that sees a forward's sites, or None."""
        return self.recording if training == self.training and checked else None
