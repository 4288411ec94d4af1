"""Says that a training compiles, so that nobody thinks that it hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fp4graph import torch_internals

#: The seconds to the first text about a training that has made no step, and between two texts.
PATIENCE = 5.0


@contextmanager
def waiting(say: Callable[[str, bool], object]) -> Iterator[Callable[[], None]]:
    """Call ``say(text, first)`` every few seconds in this context, until the function that it yields is called.

    ``text`` counts the graphs that torch.compile has captured since the context began; ``first`` is True at the first
    call. ``say`` runs in another thread.
    """
    stepped, begun = threading.Event(), torch_internals.captured_graphs()

    def watch() -> None:
        first = True
        while not stepped.wait(PATIENCE):
            graphs = torch_internals.captured_graphs() - begun
            counted = f"compiling (once): {graphs} graph{'' if graphs == 1 else 's'} so far"
            say(counted if graphs else "preparing the first step", first)
            first = False

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield stepped.set
    finally:
        stepped.set()
        watcher.join()
