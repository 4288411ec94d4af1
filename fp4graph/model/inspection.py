"""Forwards that somebody looks at: they run without a compiler, to the noise and with the effects of any other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fp4graph.graph.observe import Observation, Recording
from fp4graph.graph.watch import Watch
from fp4graph.model.capture import Capture
from fp4graph.model.prepare import PhasePlan


class Inspection:
    """What looks at the forwards of one phase: a search for NaN and Inf, or a recording of the sites.

    Attributes:
        recording: what is shown the sites, or None. training: whether in forwards with gradients, or in those without.
        watching: whether a search is on.
    """

    def __init__(self, plan: PhasePlan, dynamic: bool | None) -> None:
        self._plan, self._dynamic = plan, dynamic
        self.recording: Recording | None = None
        self.training = True
        self._watched: Capture | None = None
        self._observed: tuple[Observation, Capture] | None = None

    @property
    def watching(self) -> bool:
        return self._watched is not None

    @property
    def active(self) -> bool:
        """Whether anything may look at a forward."""
        return self.watching or self.recording is not None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Forwards in this context, and their backwards, run node by node and raise NonFiniteError."""
        watch = Watch(self._plan.names)
        former, self._watched = self._watched, Capture(self._plan, watch.backend, self._dynamic)
        try:
            yield
        finally:
            self._watched = former
            watch.close()

    def capture(self, *, training: bool, checked: bool) -> Capture | None:
        """Return what a forward runs that is looked at; None for any other forward.

        Args:
            training: whether the forward has gradients. checked: whether the coverage of the model was checked.
        """
        if self._watched is not None:
            return self._watched
        if self.recording is None or training != self.training or not checked:
            return None
        if self._observed is None:
            observation = Observation(self.recording)
            self._observed = observation, Capture(self._plan, observation.backend, self._dynamic)
        observation, capture = self._observed
        observation.recording = self.recording
        return capture
