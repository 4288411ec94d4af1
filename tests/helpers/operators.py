"""Checks what compilers take on trust about an operator of fp4graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def check_declaration(name: str, arguments: tuple[Any, ...]) -> None:
    """Check an operator's schema and fake, and the strides of all results; opcheck compares only dense ones."""
    operator = getattr(torch.ops.fp4graph, name).default
    torch.library.opcheck(operator, arguments)
    real = operator(*arguments)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = operator(*tree_map_only(Tensor, mode.from_tensor, arguments))
    results, fakes = (each if isinstance(each, (tuple, list)) else (each,) for each in (real, fake))
    assert [_layout(each) for each in fakes] == [_layout(each) for each in results]


def _layout(x: Tensor | None) -> tuple[Any, ...] | None:
    if x is None:
        return None
    is_empty_vector = x.dim() == 1 and not x.numel()
    return x.shape, () if is_empty_vector else x.stride(), x.dtype
