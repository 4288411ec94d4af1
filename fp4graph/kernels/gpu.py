"""The GPUs on which the Triton kernels run. This module does not import Triton, which may be missing."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fp4graph import torch_internals
from fp4graph.kernels import switches
from fp4graph.numerics import target

_OLDEST = (8, 0)  # the oldest compute capability with bfloat16


def multiplies(left: Tensor, right: Tensor, addend: Tensor | None) -> bool:
    """True if the kernel of triton_product.py takes the product of ``left [..., I, K]`` and ``right [..., J, K]``: both
    are 16-bit, K is short, and ``addend`` is None or a vector of J elements. The GPU must run Triton kernels."""
    vector = addend is None or (
        addend.dim() == 1 and addend.is_contiguous() and statically_known_true(addend.shape[0] == right.shape[-2])
    )
    # A dynamic K is a number of tokens. It counts as too long.
    short = statically_known_true(left.shape[-1] <= switches.current().products)
    return vector and short and left.dtype in (torch.bfloat16, torch.float16)


def multiplies_bfloat16(device: torch.device) -> bool:
    """True if code for ``device`` may multiply bf16 matrices and return the fp32 accumulator. This needs a GPU of
    compute capability 8.0 or later, and the switch ``bf16_products``."""
    return switches.current().bf16_products and target.kind(device) == "cuda" and _has_bfloat16()


def products_in_fp32() -> AbstractContextManager[None]:
    """Keep an fp32 model's products in fp32 in this context."""
    return switches.using(bf16_products=False)


@torch_internals.constant_result
def _has_bfloat16() -> bool:
    try:
        return torch.version.hip is None and torch.cuda.get_device_capability() >= _OLDEST
    except (AssertionError, RuntimeError):  # code is traced for a GPU that is absent
        return True


@functools.cache
def available() -> bool:
    """Return whether the kernels run on the GPU. Warn once if there is a GPU on which they do not run."""
    try:
        capability = torch.cuda.get_device_capability()
    except (AssertionError, RuntimeError):  # fake tensors of a GPU that is absent
        return False
    reason = None
    if importlib.util.find_spec("triton") is None:
        reason = "Triton is not installed; install the package triton"
    elif capability < _OLDEST:
        reason = f"compute capability {capability[0]}.{capability[1]} is below {_OLDEST[0]}.{_OLDEST[1]}"
    elif torch.cuda.is_available():  # otherwise code is generated for a GPU that is absent
        reason = importlib.import_module("fp4graph.kernels.triton_trial").failure(torch.device("cuda"))
    if reason is not None:
        warnings.warn(
            f"the GPU kernels cannot be used ({reason}); quantizers run as tensor code, which reads and writes more",
            stacklevel=2,
        )
    return reason is None
