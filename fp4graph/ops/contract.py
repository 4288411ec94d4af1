"""Calls of tensor stages: the context that a stage gets, and the checks of the result that it returns.

An error names the plugin that breaks its contract, and the stage. The checks look at shapes and dtypes alone, so that
they cost nothing in compiled code and trace with symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.overrides import TorchFunctionMode

from fp4graph import torch_internals
from fp4graph.errors import Error, PluginError
from fp4graph.numerics.blocking import Blocking, Groups, is_scalar
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.segments import Segments
from fp4graph.technique import OPTIMIZER_STAGES, BlockScale, Context, Part, Quantization, StateEntry, Technique

#: Parts of techniques with their contexts, in the policy's order. Not a mapping: Dynamo cannot trace a pydantic model's
#: hash.
Acting = Sequence[tuple[Part, Context]]


def context(part: Part, draw: Draw | None, blocking: Blocking, device: torch.device, **rest: Any) -> Context:
    """Return the context of ``part``, with random bits from ``draw`` only if ``part.draws``.

    Args:
        rest: the attributes of the context that do not depend on ``draw``.
    """
    draw = draw if part.draws else None
    varying = Noise(None, blocking, device) if draw is None else draw.noise(blocking, device)
    constant = Noise(None if draw is None else draw.constant, blocking, device)
    count = None if draw is None else draw.count
    return Context(blocking, varying, constant, count, draw=draw, **rest)


def at_stage(stage: str, acting: Acting) -> Iterator[tuple[Any, Context]]:
    """Yield the parts that act at ``stage``, in order."""
    return ((part, context) for part, context in acting if part.acts_at(stage))


class _Values(torch_internals.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that bring values of tensors to Python, whose shapes depend on values, or that draw.

    Compiled code cannot run the former: without this class a technique would train under ``eager`` and fail under
    Inductor.
    """

    def __init__(self, part: Part, stage: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._broken = partial(broken, part, stage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        depends = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if depends and not _has_known_shape(func, args, kwargs or {}):
            raise self._broken(f"{func} {_DEPENDS}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise self._broken(f"{func} {_DRAWS}")
        return func(*args, **(kwargs or {}))


class _Lists(TorchFunctionMode):
    """Refuses what :class:`_Values` does not see, because it dispatches no operation."""

    def __init__(self, part: Part, stage: str) -> None:
        super().__init__()
        self._broken = partial(broken, part, stage)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            raise self._broken(f".{func.__name__}() {_DEPENDS}")
        return func(*args, **(kwargs or {}))


_DEPENDS = (
    "depends on the values of a tensor, as .item(), float(), bool() and masks as indices do; a stage is compiled for "
    "all values, so write it with torch.where and reductions"
)

_DRAWS = (
    "draws from torch's generator, so that a repeated forward and another backend would draw other numbers; take the "
    "random bits of context.noise or context.constant"
)


_WRITES = (
    "writes into a tensor that it was given, which may be the weight itself; write x * 2 in place of x.mul_(2), or "
    "clone the tensor first"
)


def _has_known_shape(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether the shape of this call's result follows from the arguments, unlike that of other calls."""
    if func is torch.ops.aten.index.Tensor:  # indexed by numbers, not by a mask
        return not any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return kwargs.get("output_size") is not None  # repeat_interleave


#: The stages that have run without depending on values, with the shapes of their arguments: each is checked once.
_checked: WeakKeyDictionary[Part, set[tuple[Any, ...]]] = WeakKeyDictionary()


def run(part: Part, stage: str, *args: object) -> Any:
    """Return the result of a stage. An exception of the stage becomes an error that names the plugin."""
    try:
        # Dynamo cannot trace a mode, and refuses such operations itself.
        if torch.compiler.is_dynamo_compiling() or stage in OPTIMIZER_STAGES:
            return getattr(part, stage)(*args)
        case = stage, *(str(x.shape) for x in args if isinstance(x, Tensor))
        if case in _checked.get(part, ()):
            return getattr(part, stage)(*args)
        given = [x for x in _given(args) if not x.is_inference()]  # a tensor of inference mode has no version
        versions = [x._version for x in given]
        with _Values(part, stage), _Lists(part, stage):
            result = getattr(part, stage)(*args)
        if [x._version for x in given] != versions:
            raise broken(part, stage, _WRITES)
        _checked.setdefault(part, set()).add(case)
        return result
    except (Error, torch.OutOfMemoryError):  # of another stage that this stage called, or not the plugin's fault
        raise
    except Exception as error:
        raise broken(part, stage, f"{type(error).__name__}: {error}") from error


def _given(args: Iterable[object]) -> Iterator[Tensor]:
    """Yield the tensors that the arguments of a stage hold."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, tuple):
            yield from _given(arg)
        elif isinstance(arg, Context):
            yield from arg.state.values()
        elif isinstance(arg, Quantization):
            yield from (arg.values, arg.z, arg.scale)


def run_like(part: Part, stage: str, like: Tensor, *args: object) -> Tensor | None:
    """Return the result of a stage: None, or a tensor that is checked to have the shape and dtype of ``like``."""
    result = run(part, stage, *args)
    return None if result is None else same(part, stage, result, like)


def same(part: Part, stage: str, result: Any, like: Tensor, *, any_float: bool = False) -> Tensor:
    """Return ``result``, checked to be a tensor of the shape, device and dtype of ``like``; with ``any_float``, of any
    floating-point dtype."""
    tensor = _float(part, stage, result)
    if tensor.shape != like.shape:
        raise broken(part, stage, f"returned shape {_shape(tensor)} where {_shape(like)} is due")
    if tensor.device != like.device or not (any_float or tensor.dtype is like.dtype):
        raise broken(
            part, stage, f"returned {tensor.dtype} on {tensor.device} where {like.dtype} on {like.device} is due"
        )
    return tensor


def lines(part: Part, stage: str, operand: Any, like: Tensor) -> Tensor:
    """Return ``operand``, checked to be a tensor on the device and of the shape of ``like``, or 1 in place of sizes."""
    tensor = _float(part, stage, operand)
    sizes = zip(tensor.shape, like.shape, strict=False)
    if tensor.dim() != like.dim() or not all(statically_known_true(size == 1) or size == due for size, due in sizes):
        raise broken(part, stage, f"has shape {_shape(tensor)} where {_shape(like)} is due, or 1 in place of a size")
    if tensor.device != like.device:
        raise broken(part, stage, f"is on {tensor.device}, and the operand on {like.device}")
    return tensor


def broadcastable(part: Part, stage: str, result: Any, like: Tensor) -> Tensor:
    """Return ``result``, checked to be a tensor of the dtype of ``like`` that broadcasts to its shape. Unless it
    is one number, it must be on the device of ``like``."""
    tensor = _float(part, stage, result)
    sizes = zip(reversed(tensor.shape), reversed(like.shape), strict=False)
    if tensor.dim() > like.dim() or not all(statically_known_true(size == 1) or size == due for size, due in sizes):
        raise broken(part, stage, f"returned shape {_shape(tensor)}, which does not broadcast to {_shape(like)}")
    if tensor.dtype is not like.dtype or not (tensor.device == like.device or is_scalar(tensor)):
        due = f"{like.dtype} on {like.device}"
        raise broken(part, stage, f"returned {tensor.dtype} on {tensor.device} where {due} is due")
    return tensor


def require_granularity(part: BlockScale, gamma: Tensor, asked: Sequence[Groups], segments: Segments | None) -> None:
    """Raise PluginError if γ is seen to have another granularity than ``group_granularity`` declares.

    Args:
        asked: the groups whose statistics the technique asked for.
        segments: the operand's segments. Without segments, γ of "tensor" and of "all" is one number.
    """
    declared = part.group_granularity
    if declared is None:
        return
    other = next((groups.granularity for groups in asked if groups.granularity != declared), None)
    if other is not None:
        raise broken(part, "group_scale", f"asked for groups of {other!r}; its group_granularity is {declared!r}")
    if (declared == "all" or (declared == "tensor" and segments is None)) and not is_scalar(gamma):
        raise broken(part, "group_scale", f"returned {_shape(gamma)}; its group_granularity is {declared!r}")


def along_last(part: Part, stage: str, result: Any, like: Tensor) -> Tensor:
    """Return ``result``, checked to be a tensor of the shape of ``like`` except for the length of the last axis, on its
    device, and of its dtype, fp32 or bf16."""
    tensor = _float(part, stage, result)
    if tensor.dim() != like.dim() or tensor.shape[:-1] != like.shape[:-1]:
        due = ", ".join([*map(str, like.shape[:-1]), "..."])
        raise broken(part, stage, f"returned shape {_shape(tensor)} where ({due}) is due")
    dtypes = dict.fromkeys((like.dtype, torch.float32, torch.bfloat16))  # hardware rotates to bf16
    if tensor.device != like.device or tensor.dtype not in dtypes:
        due = " or ".join(map(str, dtypes))
        raise broken(part, stage, f"returned {tensor.dtype} on {tensor.device} where {due} on {like.device} is due")
    return tensor


def initial(technique: Technique, entry: StateEntry, weight_name: str) -> Callable[[Tensor], Tensor]:
    """Return ``entry.init`` for one weight, with its result checked."""

    @at(weight_name)
    def init(weight: Tensor) -> Tensor:
        # A fake tensor has no values, so all calls with one shape give the same result as the first.
        fake = isinstance(weight, torch_internals.FakeTensor)
        case = (entry.init, entry.weight_like, str(weight.shape), weight.dtype) if fake else None
        if case in _initials:
            shape, dtype = _initials[case]
            return weight.new_empty(shape, dtype=dtype)
        try:
            value = entry.init(weight)
        except Exception as error:
            raise broken(technique, f"state {entry.name!r}", f"{type(error).__name__}: {error}") from error
        if not isinstance(value, Tensor) or (entry.weight_like and value.shape != weight.shape):
            got = f"shape {_shape(value)}" if isinstance(value, Tensor) else type(value).__name__
            message = f"starts with {got} where a tensor of shape {_shape(weight)} is due"
            raise broken(technique, f"state {entry.name!r}", message)
        if case is not None:
            _initials[case] = value.shape, value.dtype
        elif value.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr():
            value = value.clone()  # else the entry would be the weight, and writing one would change the other
        return value

    return init


#: The shapes and dtypes of initial values of state, by entry and by the shape and dtype of the weight.
_initials: dict[Any, tuple[torch.Size, torch.dtype]] = {}


def broken(technique: Technique | Part, stage: str, message: str) -> PluginError:
    """Return the error for a stage that breaks its contract."""
    return PluginError(f"technique {technique.name!r}, {stage}: {message}", plugin=technique.plugin or technique.name)


@contextmanager
def at(site: str | None) -> Iterator[None]:
    """Add the site to the plugins' errors that are raised in this context."""
    try:
        yield
    except PluginError as error:
        error.site = error.site or site
        raise


def _float(part: Part, stage: str, result: Any) -> Tensor:
    if not isinstance(result, Tensor):
        raise broken(part, stage, f"returned {type(result).__name__} where a tensor is due")
    if not result.is_floating_point():
        raise broken(part, stage, f"returned {result.dtype} where floating point is due")
    return result


def _shape(x: Tensor) -> tuple[int | torch.SymInt, ...]:
    return tuple(x.shape)
