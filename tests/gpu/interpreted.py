"""Triton's interpreter: kernels run on CPU tensors in NumPy, one program after another.

``TRITON_INTERPRET=1`` must be set before Triton is imported, so this module is for a worker process (conftest.py).

This module makes the interpreter compute as a GPU does: functions of libdevice, which the interpreter cannot call;
casts from float32 to bfloat16, which it truncates where hardware rounds to nearest even; products of bfloat16, of which
it multiplies the bits; and fused multiply-adds, which it rounds twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpretedFunction,
    InterpreterBuilder,
    InterpreterOptions,
    ReduceOps,
    TensorHandle,
)

from tests.gpu.machine_code import Generated


def prepare() -> None:
    """Patch Triton's interpreter and torch. A worker process calls this once, at its start."""
    np.seterr(all="ignore")  # integers wrap around, NaN is compared, as on the GPU
    functions = {"floor": np.floor, "ceil": np.ceil, "nearbyint": np.rint, "rint": np.rint, "sqrt": np.sqrt}
    for name, function in functions.items():
        setattr(triton_helpers.libdevice, name, _elementwise(function))
    InterpreterBuilder.cast_impl = _cast
    InterpreterBuilder.create_dot = _dot
    InterpreterBuilder.create_fma = _fma
    ReduceOps.apply_impl = _reduce
    InterpretedFunction.__call__ = _called
    interpreter.interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)  # as Inductor's launches
    triton_helpers.set_driver_to_gpu = lambda: None
    torch.cuda._DeviceGuard = lambda index: nullcontext()
    torch.cuda.set_device = lambda index: None


def run_generated(generated: Generated, args: Sequence[Tensor]) -> list[Tensor]:
    """Run the kernels that Inductor generated for a GPU, by its launches.

    Each kernel runs in the configuration with the largest blocks, because the interpreter's time grows with the number
    of programs.
    """
    module = PyCodeCache.load(generated.source)
    for kernel in vars(module).values():
        if isinstance(kernel, CachingAutotuner):
            kernel.configs.sort(key=lambda config: -math.prod(config.kwargs.values()))
    module.empty_strided_cuda = module.empty_strided_cpu
    module.get_raw_stream = lambda index: 0
    return list(module.call([*generated.constants, *args]))


def _elementwise(function: Callable[[Any], Any]) -> Callable[..., tl.tensor]:
    def apply(x: tl.tensor, **_: Any) -> tl.tensor:
        return tl.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)

    return apply


_cast_impl = InterpreterBuilder.cast_impl


def _cast(self: InterpreterBuilder, value: TensorHandle, to: Any) -> TensorHandle:
    target = to.scalar
    if value.dtype.scalar == tl.float32 and target == tl.bfloat16:
        rounded = torch.from_numpy(np.ascontiguousarray(value.data)).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), target)
    if value.dtype.scalar == tl.bfloat16 and target == tl.float32:
        return TensorHandle((value.data.astype(np.uint32) << 16).view(np.float32), target)
    return _cast_impl(self, value, to)


_create_dot = InterpreterBuilder.create_dot


def _dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    """Multiply bfloat16 in float32, in which the products are exact."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = (_cast(self, x, tl.float32) for x in (a, b))
    return _create_dot(self, a, b, *rest)


def _fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> TensorHandle:
    """Return x·y + z in float32, rounded once: the product is exact in float64, and the sum is rounded to odd there, so
    that rounding it to float32 is as rounding the exact sum."""
    product, addend = x.data.astype(np.float64) * y.data, z.data.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # the exact sum less total
    bits = total.view(np.int64)
    even = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)  # the exact sum is larger in magnitude
    bits = np.where(even, np.where(away, bits + 1, bits - 1), bits)
    return TensorHandle(bits.view(np.float64).astype(np.float32), z.dtype)


_call_function = InterpretedFunction.__call__


def _called(self: InterpretedFunction, *args: Any, **kwargs: Any) -> Any:
    """Skip patching the language again for every function that a kernel calls. Functions of Triton's library, which
    sorting calls, need it: they import the language by another name."""
    if self.fn.__module__.startswith("triton."):
        return _call_function(self, *args, **kwargs)
    return self.rewrite()(*args, **kwargs)


_apply_impl = ReduceOps.apply_impl


def _reduce(self: ReduceOps, operands: tuple[tl.tensor, ...]) -> Any:
    """Compute Inductor's maximum, which keeps NaN, by NumPy's: element by element it would take most of the time."""
    if self.combine_fn is triton_helpers.maximum:
        return self.min_max(operands[0], val_reduce_op=np.max)
    return _apply_impl(self, operands)
