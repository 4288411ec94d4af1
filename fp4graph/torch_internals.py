"""Uses of torch beyond its public interface, one function for each.

Besides this file only three files of kernels/ name private parts of torch. tests/test_torch_internals.py says why,
checks all files, and has a test for each function. Each docstring says why the public interface does not suffice, and
on which versions of torch the test has passed. Dynamo and Inductor are slow to import, so only functions import them.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import CodeType
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn, overrides
from torch._C._dynamo import eval_frame
from torch._guards import CompileContext

# Names that torch documents, and that only private modules define.
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import forward_ad
from torch.fx import GraphModule, Node
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass
from torch.utils.checkpoint import _CheckpointFrame

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Maps and flattens nested lists, tuples and dicts as torch does.
pytree = _pytree
#: The built-in functions behind torch.nn.functional, which graphs also call directly.
BUILTIN_NN: Any = torch._C._nn
#: Returns the function with which Dynamo compiles frames now; not callable if Dynamo is disabled or past a limit. This
#: is torch's C function, because Dynamo would compile a Python function around it. Checked on torch 2.13 to 2.15.
frame_hook = eval_frame.get_eval_frame_callback


def dynamo_setting(name: str) -> Any:
    """Return a setting of Dynamo, or None if there is none; it has no getter. Checked on torch 2.13 to 2.15."""
    return getattr(torch._dynamo.config, name, None)


@contextmanager
def dynamo_settings(**changes: Any) -> Iterator[None]:
    """Change settings of Dynamo in this context; skip settings that this torch does not have. torch.compile has no
    arguments for Dynamo's limits and for the splits of DDP. Checked on torch 2.13 to 2.15."""
    config: Any = torch._dynamo.config
    with config.patch(**{name: value for name, value in changes.items() if hasattr(config, name)}):
        yield


def stance() -> str:
    """Return the stance of torch.compiler.set_stance, which has no getter. Checked on torch 2.13 to 2.15."""
    return str(torch._dynamo.eval_frame._stance.stance)


def compiled_frame() -> int | None:
    """Return the number that Dynamo gives to the function that it compiles now, or None. Two graphs around a graph
    break have two numbers; a recompiled graph keeps its number. Backends are not given the number. Checked on torch
    2.13 to 2.15."""
    return getattr(CompileContext.current_compile_id(), "frame_id", None)


def is_exporting() -> bool:
    """Return whether torch.export traces now. The public torch.compiler.is_exporting always returns True under Dynamo
    of torch 2.11, the version in images for GPUs. Checked on torch 2.13 to 2.15."""
    return torch.compiler._is_exporting_flag


def constant_result(function: _Function) -> _Function:
    """Have Dynamo call ``function`` while it traces, and write the result into the graph as a constant. The public
    assume_constant_result imports Dynamo at once, which takes a second. Checked on torch 2.13 to 2.15."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def retry_skipped_code() -> None:
    """Have Dynamo compile again the code that it skips. After a failed capture Dynamo skips the code object for good.
    Another model of the class would then run that code outside its graph. torch.compiler.reset would drop all graphs of
    the process. Checked on torch 2.13 to 2.15."""
    from torch._dynamo import convert_frame

    default = eval_frame._FrameAction.DEFAULT
    fresh = eval_frame._FrameExecStrategy(default, default)
    for reference in convert_frame.input_codes.seen:
        if (code := reference()) is not None:
            eval_frame.set_code_exec_strategy(code, fresh)


def forget_code(code: CodeType) -> None:
    """Drop the graphs that Dynamo has compiled of ``code``, and the record of recompilations, which keeps ``code``
    alive. torch.compiler.reset would drop all graphs of the process. Checked on torch 2.13 to 2.15."""
    torch._dynamo.reset_code(code)  # type: ignore[attr-defined]  # not in its __all__
    torch._dynamo.utils.guard_failures.pop(code, None)


def captured_graphs() -> int:
    """Return how many graphs Dynamo has captured; only private statistics say it. Checked on torch 2.13 to 2.15."""
    if "torch._dynamo" not in sys.modules:
        return 0
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def is_full(function: object) -> bool:
    """Return whether Dynamo has made as many graphs of ``function``'s code as its recompile limit allows. Past the
    limit Dynamo runs the code uncompiled, and only its log says so. Checked on torch 2.13 to 2.15."""
    code, limit = getattr(function, "__code__", None), torch._dynamo.config.recompile_limit
    return code is not None and len(eval_frame._debug_get_cache_entry_list(code)) >= limit


def guard_failures() -> Mapping[CodeType, list[str]]:
    """Return the failed guards of each code object that Dynamo has compiled, as texts; do not change the mapping.
    Otherwise only Dynamo's log shows failed guards. Checked on torch 2.13 to 2.15."""
    return torch._dynamo.utils.guard_failures


def is_internal_error(error: BaseException) -> bool:
    """Return whether ``error`` is an internal error of Dynamo; its ``__context__`` is the error of the traced code.
    Dynamo's errors have no public names. Checked on torch 2.13 to 2.15."""
    return isinstance(error, torch._dynamo.exc.InternalTorchDynamoError)


def is_runtime_error(error: BaseException) -> bool:
    """Return whether ``error`` says that an operation failed on the fake tensors that Dynamo traces with. Dynamo's
    errors have no public names. Checked on torch 2.13 to 2.15."""
    return isinstance(error, torch._dynamo.exc.TorchRuntimeError)


def compiled_module(model: nn.Module) -> nn.Module | None:
    """Return the module inside a result of ``torch.compile(module)``; None for any other module. The class of that
    result has no public name. Checked on torch 2.13 to 2.15."""
    return model._orig_mod if isinstance(model, torch._dynamo.OptimizedModule) else None


def source_of(placeholder: Node) -> str | None:
    """Return Dynamo's text for the object behind a placeholder, such as ``L['self'].fc1.weight``, or None. No public
    part of the graph says which parameter a placeholder is. Checked on torch 2.13 to 2.15."""
    name = getattr(getattr(placeholder, "_dynamo_source", None), "name", None)
    return name if name is None or isinstance(name, str) else str(name())


def unmark_static(placeholder: Node) -> None:
    """Tell AOTAutograd that a placeholder may hold a different tensor at each call.

    Dynamo marks the tensors of modules as static: their addresses stay the same. torch has a public function that sets
    the mark, but none that removes it. Checked on torch 2.13 to 2.15.
    """
    placeholder.meta.get("tensor_dict", {}).pop("_dynamo_static_input_type", None)


def backend_named(name: str) -> Callable[[GraphModule, list[Any]], Callable[..., Any]]:
    """Return the torch.compile backend ``name`` as a function. torch.compile takes names; a backend that passes its
    graph on to another backend needs the function. Checked on torch 2.13 to 2.15."""
    return torch._dynamo.lookup_backend(name)


def compile_with_inductor(gm: GraphModule, example_inputs: list[Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Compile a graph with Inductor; ``options`` maps names of Inductor's settings to values. The backend
    ``"inductor"`` takes no options. Checked on torch 2.13 to 2.15."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    inner: Any = unlike_loops_unsplit()(compile_fx_inner)  # compiles each graph; that of the backward may come later
    return compile_fx(gm, example_inputs, inner_compile=inner, config_patches=dict(options) or None)  # type: ignore[return-value]


@contextmanager
def unlike_loops_unsplit() -> Iterator[None]:
    """Keep Inductor from splitting fused loops of unlike axes in this context: in code for a CPU that fails at an
    assertion, and no setting turns it off. Checked on torch 2.13 to 2.15."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.ir import ComputedBuffer

    split = CppScheduling.try_loop_split

    def split_alike(scheduling: Any, nodes: list[Any]) -> list[Any]:
        sizes = [node.node.get_default_sizes_body()[0] for node in nodes if isinstance(node.node, ComputedBuffer)]
        return split(scheduling, nodes) if all(each == sizes[0] for each in sizes) else nodes

    with mock.patch.object(CppScheduling, "try_loop_split", split_alike):
        yield


def split_by_buckets(backend: Callable[..., Any], bucket_bytes: int) -> Callable[..., Any]:
    """Return a backend that splits the graph along DDP's buckets, as torch does, so that gradients are reduced in the
    backward. torch splits before it calls a backend; fp4graph must rewrite first. Checked on torch 2.13 to 2.15."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    first = min(bucket_bytes, torch.distributed._DEFAULT_FIRST_BUCKET_BYTES)  # type: ignore[attr-defined]
    return DDPOptimizer(bucket_bytes, backend, first).compile_fn


@contextmanager
def functions_cached(versions: Mapping[str, str]) -> Iterator[None]:
    """Let torch cache graphs that call the functions named in ``versions``, in this context.

    ``versions`` maps the qualified name of a function to a text that changes whenever the function does. torch caches
    a graph that calls a Python function only if a private setting names the function. Checked on torch 2.13 to 2.15.
    """
    config: Any = torch._inductor.config
    marked = config.unsafe_marked_cacheable_functions
    with config.patch(unsafe_marked_cacheable_functions={**marked, **versions}):
        yield


def backward_id() -> int:
    """Return the number of this thread's running backward, or -1. It has no getter. Checked on torch 2.13 to 2.15."""
    return torch._C._current_graph_task_id()


def next_sequence_number() -> int:
    """Return the number of the next node that autograd makes in this thread, which separates new from old nodes for
    :func:`compiled_backwards`. Checked on torch 2.13 to 2.15."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def compiled_backwards(tensors: list[Tensor], first: int) -> set[Any]:
    """Return the nodes of compiled backwards in the autograd graph of ``tensors`` whose number is at least ``first``. A
    node has no public number, and a compiled backward no public class. Checked on torch 2.13 to 2.15."""
    nodes = [x.grad_fn for x in (*tensors, *(x._base for x in tensors if x._base is not None))]
    seen: set[Any] = set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        if node.name() != "CompiledFunctionBackward":
            nodes.extend(before for before, _ in node.next_functions)
    return {node for node in seen if node.name() == "CompiledFunctionBackward"}


@contextmanager
def saved_tensor_hooks_kept() -> Iterator[None]:
    """If a trace in this context fails, restore whether hooks for saved tensors are allowed. Dynamo of torch 2.13 and
    2.14 disallows them for good when it gives up inside a transform of torch.func; then every activation checkpoint of
    the process fails. Checked on torch 2.13 to 2.15."""
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


def saved_tensor_hooks() -> Any:
    """Return the hooks for saved tensors in force, or None; they have no getter. Checked on torch 2.13 to 2.15."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def checkpointed_regions() -> list[Any]:
    """Return torch's objects for the regions of non-reentrant checkpointing that run now, the innermost first. A region
    has one object in its forward and its recomputation; only closures hold it. Checked on torch 2.13 to 2.15."""
    autograd, hooks = torch._C._autograd, list[Any]()
    movable = autograd._saved_tensors_hooks_get_disabled_error_message() is None
    while movable and (top := saved_tensor_hooks()) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    for pack, unpack in reversed(hooks):
        autograd._push_saved_tensors_default_hooks(pack, unpack)
    packs = [getattr(pack, "_torchdynamo_orig_callable", pack) for pack, _ in hooks]
    held = [cell.cell_contents for pack in packs for cell in getattr(pack, "__closure__", None) or ()]
    contents = (each() if isinstance(each, weakref.ref) else each for each in held)
    return [each for each in contents if isinstance(each, _CheckpointFrame)]


def saved_in(regions: list[Any]) -> int:
    """Return how many tensors ``regions`` of :func:`checkpointed_regions` have saved or computed again so far. They are
    private themselves. Checked on torch 2.13 to 2.15."""
    return sum(len(region.weak_holders) + sum(region.recomp_counter.values()) for region in regions)


def recompute_by(region: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Have a checkpointed region recompute by ``wrap`` of its function. ``region`` is one of
    :func:`checkpointed_regions` or a CheckpointFunction's context: no public hook. Checked on torch 2.13 to 2.15."""
    name = "recompute_fn" if isinstance(region, _CheckpointFrame) else "run_function"
    setattr(region, name, wrap(getattr(region, name)))


def is_functorch_active() -> bool:
    """Return whether a transform of torch.func is active. torch has no public getter. Checked on torch 2.13 to 2.15."""
    return bool(torch._C._are_functorch_transforms_active())


def is_forward_mode_active() -> bool:
    """Return whether forward-mode differentiation is active, which has no getter. Checked on torch 2.13 to 2.15."""
    return forward_ad._current_level >= 0


def has_dispatch_mode() -> bool:
    """Return whether a TorchDispatchMode, such as that of fake tensors or a FLOP counter, is active. torch has no
    public getter of modes. Checked on torch 2.13 to 2.15."""
    return _get_current_dispatch_mode() is not None


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Return a context in which no TorchDispatchMode is active. Publicly, only the code that entered a mode can leave
    it. Checked on torch 2.13 to 2.15."""
    return _disable_current_modes()


@contextmanager
def without_function_modes(kind: type) -> Iterator[None]:
    """Suspend each TorchFunctionMode of class ``kind``; torch has no such context. Checked on torch 2.13 to 2.15."""
    stack: list[Any] = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    kept = [mode for mode in stack if not isinstance(mode, kind)]

    def replace(present: list[Any], following: list[Any]) -> None:
        for _ in present:
            overrides._pop_mode()  # type: ignore[no-untyped-call]
        for mode in following:
            overrides._push_mode(mode)  # type: ignore[no-untyped-call]

    if len(kept) == len(stack):
        yield
        return
    replace(stack, kept)
    try:
        yield
    finally:
        replace(kept, stack)


@contextmanager
def fake_tensors_silent() -> Iterator[None]:
    """Keep fake tensors from logging the traceback of a failing call, in this context. torch has no setting for it.
    Checked on torch 2.13 to 2.15."""
    log = logging.getLogger(FakeTensor.__module__)
    with mock.patch.object(log, "disabled", True):
        yield


def packet_of(target: Any) -> Any:
    """Return the operator of a node's ``target`` without its overload, and any other target unchanged. The classes of
    operators have no public names. Checked on torch 2.13 to 2.15."""
    return target.overloadpacket if isinstance(target, OpOverload) else target


def qualified_name(target: Any) -> str | None:
    """Return the library and name of an operator, such as ``aten::mm``; None for any other target. An operator's public
    name lacks the library. Checked on torch 2.13 to 2.15."""
    packet = packet_of(target)
    return packet._qualified_op_name if isinstance(packet, OpOverloadPacket) else None


def operator_writes(target: Any) -> bool | None:
    """Return whether an operator may write into an argument; None for any other target. Operators have no public
    schema. Checked on torch 2.13 to 2.15."""
    if isinstance(target, HigherOrderOperator):
        return True
    if isinstance(target, OpOverload):
        return bool(target._schema.is_mutable)
    if isinstance(target, OpOverloadPacket):
        return any(getattr(target, overload)._schema.is_mutable for overload in target.overloads())  # type: ignore[no-untyped-call]
    return None


def is_alias(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors share storage; fake tensors have no addresses. Checked on torch 2.13 to 2.15."""
    return bool(torch._C._is_alias_of(a, b))  # type: ignore[attr-defined]


def fused_adamw(
    parameters: list[Tensor], gradients: list[Tensor], m: list[Tensor], v: list[Tensor], steps: list[Tensor],
    *, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """Run the fused kernel of AdamW, in place, on these gradients and this state. torch.optim.AdamW(fused=True) reads
    ``.grad`` and keeps its own state. Checked on torch 2.13 to 2.15."""
    fused: Any = torch._fused_adamw_
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    fused(parameters, gradients, m, v, [], steps, amsgrad=False, maximize=False, **options)


def active_ddp() -> DistributedDataParallel | None:
    """Return the DDP whose forward is running, or None. There is no public getter. Checked on torch 2.13 to 2.15."""
    active: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    return active


def fsdp_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype that a module of ``fully_shard`` computes in, or None if FSDP casts nothing. fully_shard takes
    the dtype in a policy and has no getter for it. Checked on torch 2.13 to 2.15."""
    dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
    return dtype
