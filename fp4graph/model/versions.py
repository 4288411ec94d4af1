"""Behaviour that depends on torch's version: the versions that are tested, and the limits of older ones."""

from __future__ import annotations

import functools
import warnings

import torch

from fp4graph import torch_internals

#: The newest minor release of torch that the tests have run on; pyproject.toml has the lowest.
NEWEST = (2, 15)


def untested(version: str) -> str | None:
    """Return a warning about a ``version`` of torch that is newer than all tested ones, or None."""
    if tuple(map(int, version.split(".")[:2])) <= NEWEST:
        return None
    newest = ".".join(map(str, NEWEST))
    return (
        f"fp4graph was tested up to torch {newest} and this is torch {version}; look for a newer fp4graph, or compare "
        f'one step under backend="eager" with a step under your backend before you trust a long run'
    )


@functools.cache
def warn_once() -> None:
    """Warn, once in a process, if torch is newer than all tested versions."""
    if (text := untested(torch.__version__)) is not None:
        warnings.warn(text, stacklevel=3)


def refused_grouped_product(error: Exception) -> str | None:
    """Return why torch.compile refuses a grouped product, if ``error`` is that refusal; None for other errors.

    Before torch 2.15 the meta kernel of ``aten::_grouped_mm``, which torch.compile runs on fake tensors, takes only
    bf16; the kernels of devices take fp32 too.
    """
    text = str(error)  # begins with the call, whose out_dtype may be float32, and ends with a line of the user's code
    reason = text.partition("got RuntimeError(")[2].partition("\n")[0]
    if "_grouped_mm" not in text or "float32" not in reason or not torch_internals.is_runtime_error(error):
        return None
    return (
        f"torch {torch.__version__} does not compile grouped_mm in fp32; make the products bf16 (autocast does not "
        "reach grouped_mm: call model.bfloat16()), or install torch 2.15"
    )
