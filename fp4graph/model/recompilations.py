"""Warns about a forward that Dynamo compiles again and again."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from fp4graph import torch_internals
from fp4graph.errors import PolicyWarning

#: Recompilations for one cause before the warning.
_REPEATS = 3
#: The value in a guard that failed: ``== 3``, ``expected 4, actual 5``, or the address of an object.
_VALUE = re.compile(r" == .*|\. expected .*|\b\d{7,}\b")
#: How Dynamo writes the way from a compiled call to the model, and from a module to children, parameters and buffers.
_ROOT = re.compile(r"call\.__closure__\[\d+\]\.cell_contents")
_HELD = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")


class Recompilations:
    """Collects the guards of one model that fail again and again, and warns about each once.

    Failures before this object was made belong to other models.
    """

    def __init__(self) -> None:
        self._before = {id(code): len(reasons) for code, reasons in torch_internals.guard_failures().items()}
        self._told: set[str] = set()
        self._untold: list[str] = []

    def look(self, frame: int | None) -> None:
        """Record the repeated causes for which Dynamo compiles ``frame``; call this during the compilation."""
        for cause, guards in self._repeated(frame).items():
            if cause not in self._told:
                self._untold.append(_warning(cause, guards))
            self._told.add(cause)

    def warn(self) -> None:
        """Warn about the causes that :meth:`look` recorded since the last warning."""
        untold, self._untold = self._untold, []
        for text in untold:
            warnings.warn(text, PolicyWarning, stacklevel=4)

    def _repeated(self, frame: int | None) -> dict[str, list[str]]:
        """Return the guards of ``frame`` that failed with several values, by the expression that they check:
        ``{"model.step": ["model.step == 0", "model.step == 1", ...]}``.

        Guards on the compiled call of a module are left out: they tell one applied model from another.
        """
        failures = torch_internals.guard_failures().items()
        guards: dict[str, dict[str, None]] = {}
        for reason in [reason for code, reasons in failures for reason in reasons[self._before.get(id(code), 0) :]]:
            graph, _, text = reason.partition(": ")
            if graph.split("/")[0] == str(frame) and "_compiled_call_impl" not in text:
                guard = re.split(r"\s+# |\n|, actual ", text)[0].strip()
                guard = _HELD.sub(r".\1", _ROOT.sub("model", guard))
                guards.setdefault(_VALUE.sub("", guard), {})[guard] = None
        return {cause: list(failed) for cause, failed in guards.items() if len(failed) >= _REPEATS}


def _warning(cause: str, guards: Sequence[str]) -> str:
    """Return the warning about ``guards``, which all check ``cause`` and fail again and again."""
    if cause.startswith("tensor"):
        remedy = "Give the model few sizes, one number of dimensions, and dynamic=True of fp4graph.apply"
    elif cause.startswith(("args", "kwargs", "len(")):
        remedy = "Pass a tensor instead; torch.compile treats most other arguments as constants"
    else:
        remedy = (
            "Hold the value in a tensor, such as a buffer that is changed in place, or change it rarely; for an int, "
            "torch._dynamo.config.allow_unspec_int_on_nn_module = True is a remedy too"
        )
    return (
        f"this forward compiles again and again: {len(guards) + 1} times so far, because a guard fails with another "
        f"value each time ({'; '.join(guards[-3:])}). A compilation is slow, and past the recompile limit the forward "
        f"runs uncompiled. {remedy}"
    )
