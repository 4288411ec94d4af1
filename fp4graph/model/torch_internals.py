"""Requests to Dynamo for which torch has no public function. They work in torch 2.13 to 2.15."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType

import torch
from torch._C._dynamo import eval_frame
from torch._dynamo import convert_frame
from torch._dynamo.utils import guard_failures
from torch._guards import CompileContext

#: The value in a guard that failed: ``== 3``, ``expected 4, actual 5``, or the address of an object.
_VALUE = re.compile(r" == .*|\. expected .*|\b\d{7,}\b")
#: The way from the compiled function of a call to the model, and from a module to what it holds.
_ROOT = re.compile(r"call\.__closure__\[\d+\]\.cell_contents")
_HELD = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")


def compiled_frame() -> int | None:
    """Return the number that Dynamo has for the function that it compiles, or None."""
    return getattr(CompileContext.current_compile_id(), "frame_id", None)


def retry_skipped_code() -> None:
    """Have Dynamo compile again what it has given up.

    A code object on which a capture failed is skipped for good, whoever runs it: another model of the class would run
    that code, and what it calls, outside of its graph.
    """
    default = eval_frame._FrameAction.DEFAULT
    fresh = eval_frame._FrameExecStrategy(default, default)
    for reference in convert_frame.input_codes.seen:
        if (code := reference()) is not None:
            eval_frame.set_code_exec_strategy(code, fresh)


def forget_code(code: CodeType) -> None:
    """Drop what Dynamo has compiled of ``code`` and the record of its recompilations, which would keep it for good."""
    torch._dynamo.reset_code(code)  # type: ignore[attr-defined]  # not in its __all__
    guard_failures.pop(code, None)


@contextmanager
def saved_tensor_hooks_kept() -> Iterator[None]:
    """Keep hooks for saved tensors allowed, or not, where a trace in this context fails.

    Dynamo of torch 2.13 and 2.14 disallows them for good when it gives up inside a transform of torch.func, and then
    every checkpoint of the process fails.
    """
    hooks = torch._C._autograd
    before = hooks._saved_tensors_hooks_get_disabled_error_message()
    try:
        yield
    except BaseException:
        if before is None:
            hooks._saved_tensors_hooks_enable()
        else:
            hooks._saved_tensors_hooks_disable(before)
        raise


def is_full(function: object) -> bool:
    """Return whether Dynamo has made as many graphs of ``function``'s code as its recompile limit allows."""
    code, limit = getattr(function, "__code__", None), torch._dynamo.config.recompile_limit
    return code is not None and len(eval_frame._debug_get_cache_entry_list(code)) >= limit


def failed_guards() -> dict[int, int]:
    """Return how many guards have failed of each code object that Dynamo has compiled, by its id."""
    return {id(code): len(reasons) for code, reasons in guard_failures.items()}


def repeated_guards(times: int, before: Mapping[int, int]) -> dict[str, list[str]]:
    """Return the guards of the function in compilation that failed with at least ``times`` different values, by what
    they ask for: ``{"model.step": ["model.step == 0", "model.step == 1", ...]}``.

    ``before`` is an earlier result of :func:`failed_guards`: failures up to then are those of other models. Guards on
    the compiled call of a module are ours, and tell one model from another.
    """
    guards: dict[str, dict[str, None]] = {}
    for reason in [reason for code, reasons in guard_failures.items() for reason in reasons[before.get(id(code), 0) :]]:
        graph, _, text = reason.partition(": ")
        if graph.split("/")[0] == str(compiled_frame()) and "_compiled_call_impl" not in text:
            guard = re.split(r"\s+# |\n|, actual ", text)[0].strip()
            guard = _HELD.sub(r".\1", _ROOT.sub("model", guard))
            guards.setdefault(_VALUE.sub("", guard), {})[guard] = None
    return {cause: list(failed) for cause, failed in guards.items() if len(failed) >= times}
