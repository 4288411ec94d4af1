"""Every function of torch_internals does what it says. Only that file and those in ALLOWED name private parts of
torch."""

from __future__ import annotations

import ast
import copy
import inspect
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fp4graph import torch_internals as internals
from tests.helpers.models import module_of

ROOT = Path(__file__).parents[1]
FILE = "fp4graph/torch_internals.py"
#: Files that name private parts of torch themselves, each with the reason.
ALLOWED = {
    "fp4graph/kernels/inductor.py": "reads and checks the settings of Inductor and the errors of its C++ compiler",
    "fp4graph/kernels/build.py": "compiles and caches kernels the way Inductor compiles and caches its own",
    "fp4graph/kernels/triton_trial.py": "leaves the modes of a trace to run a kernel once on real tensors",
}
#: Not counted as private: names with an underscore that torch documents, and names of operators.
DOCUMENTED = re.compile(r"torch\._foreach_\w+|torch\.ops\..*|.*\.__\w+__")
CHECKED = re.compile(r"Checked\s+on\s+torch\s+2\.13\s+to\s+2\.15\.")


def private_names(source: str) -> set[str]:
    """Return the private modules and attributes of torch that a file names, as dotted names, and its strings that
    are names of private attributes of Dynamo.

    Attributes of objects that torch makes, such as ``module._parameters``, are not found: only names that begin with
    an import of torch are.
    """
    tree, aliases, found = ast.parse(source), {}, set()
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            name = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            if name.partition(".")[0] == "torch":
                found.add(name)
                bare = isinstance(node, ast.Import) and not alias.asname
                aliases[alias.asname or alias.name.partition(".")[0]] = "torch" if bare else name
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and re.fullmatch(r"_(torch)?dynamo\w*", str(node.value)):
            found.add(str(node.value))
        if isinstance(node, ast.Attribute) and re.fullmatch(r"[\w.]+", name := ast.unparse(node)):
            first, _, rest = name.partition(".")
            found |= {f"{aliases[first]}.{rest}"} if first in aliases else set()
    return {name for name in found if re.search(r"(^|\.)_", name) and not DOCUMENTED.fullmatch(name)}


@pytest.mark.slow
def test_no_other_file_names_private_parts_of_torch():
    files = [file for folder in ("fp4graph", "plugins") for file in (ROOT / folder).rglob("*.py")]
    found = {file.relative_to(ROOT).as_posix(): private_names(file.read_text("utf-8")) for file in files}
    assert len(found.pop(FILE)) > 20, "the names were not read"
    assert {place: names for place, names in found.items() if names and place not in ALLOWED} == {}
    assert all(found[place] for place in ALLOWED), "an allowed file names nothing private any more"


PRIVATE = (
    "import torch._dynamo",
    "import torch._inductor.config as c",
    "from torch._guards import CompileContext",
    "from torch.utils import _pytree",
    "from torch.utils.checkpoint import _CheckpointFrame",
    "import torch\ndef f():\n    return torch._C._is_tracing()",
    "import torch\nx = torch._dynamo.config.disable",
    "import torch as t\nx = t.autograd._get_sequence_nr()",
    "from torch.autograd import forward_ad\nx = forward_ad._current_level",
    "getattr(node, '_dynamo_source', None)",
)
PUBLIC = (
    "import torch\nx = torch.__version__",
    "import torch\ntorch._foreach_add_(a, b)",
    "import torch\nx = torch.ops.aten._grouped_mm",
    "from fp4graph import _private\n_private._x",
    "import torch.nn.functional as F\nF.linear(x, w)",
)


@pytest.mark.parametrize("source", [*PRIVATE, *PUBLIC])
def test_only_private_names_are_found(source):
    assert bool(private_names(source)) == (source in PRIVATE)


FUNCTIONS = [node for node in ast.parse((ROOT / FILE).read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("name", [node.name for node in FUNCTIONS])
def test_every_function_has_a_test_and_says_where_it_was_checked(name):
    assert f"test_{name}" in globals() or name in {*IN_CONTEXT, *(function.__name__ for function, *_ in RESULTS)}
    assert CHECKED.search(str(getattr(internals, name).__doc__))


compiled = partial(torch.compile, backend="eager", dynamic=False)


def add(x: Tensor, n: int = 1) -> Tensor:
    return x + n


class Kept:
    """A backend that keeps the graphs that it is given, and what ``look`` returns for each."""

    def __init__(self, look: Callable[[GraphModule], Any] = lambda gm: None) -> None:
        self.graphs: list[GraphModule] = []
        self.seen: list[Any] = []
        self._look = look

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        self.graphs.append(gm)
        self.seen.append(self._look(gm))
        return gm.forward


#: For functions that depend on a context: the context, the result outside the context, and the result inside.
IN_CONTEXT: dict[str, tuple[Callable[[], Any], Any, Any]] = {
    "stance": (lambda: torch.compiler.set_stance("force_eager"), "default", "force_eager"),
    "is_forward_mode_active": (torch.autograd.forward_ad.dual_level, False, True),
    "has_dispatch_mode": (lambda: FlopCounterMode(display=False), False, True),
}


aten, LAYER = torch.ops.aten, nn.Linear(2, 2)
#: For functions of one argument: the function, the argument, the result.
RESULTS = (
    *((internals.packet_of, op, aten.mm) for op in (aten.mm.default, aten.mm)),
    *((internals.packet_of, op, op) for op in (torch.mm, "relu")),
    *((internals.qualified_name, op, "aten::mm") for op in (aten.mm.default, aten.mm)),
    *((internals.qualified_name, op, None) for op in (torch.mm, "relu")),
    *((internals.operator_writes, op, True) for op in (aten.add_.Tensor, aten.add_, torch.ops.higher_order.cond)),
    *((internals.operator_writes, op, False) for op in (aten.mm.default, aten.view)),
    (internals.operator_writes, torch.add, None),
    (internals.compiled_module, torch.compile(LAYER), LAYER),
    (internals.compiled_module, LAYER, None),
    (internals.is_internal_error, torch._dynamo.exc.InternalTorchDynamoError("a defect"), True),
    (internals.is_internal_error, RuntimeError(), False),
    (internals.is_full, object(), False),
)


@pytest.mark.parametrize(("function", "argument", "result"), RESULTS, ids=lambda x: re.split(r"\(| at 0x", str(x))[0])
def test_functions_of_one_argument(function, argument, result):
    found = function(argument)
    assert type(found) is type(result)
    assert found == result


@pytest.mark.parametrize("name", IN_CONTEXT)
def test_functions_that_depend_on_a_context(name):
    function, (context, outside, inside) = getattr(internals, name), IN_CONTEXT[name]
    assert function() == outside
    with context():
        assert function() == inside
    assert function() == outside


# Dynamo


def test_dynamo_settings():
    before = internals.dynamo_setting("recompile_limit")
    assert isinstance(before, int)
    assert internals.dynamo_setting("no_such_setting") is None
    with internals.dynamo_settings(recompile_limit=before + 1, no_such_setting=1):
        assert internals.dynamo_setting("recompile_limit") == before + 1
        assert internals.dynamo_setting("no_such_setting") is None
    assert internals.dynamo_setting("recompile_limit") == before


test_dynamo_setting = test_dynamo_settings  # one test of both functions


def test_frame_hook():
    seen = []

    @torch.compiler.disable
    def outside():
        seen.append(callable(internals.frame_hook()))

    def function(x):
        for _ in range(1):
            torch._dynamo.graph_break()  # Dynamo skips this frame, but compiles the functions it calls
        seen.append(callable(internals.frame_hook()))
        outside()
        return x + 1

    compiled(function)(torch.ones(1))
    assert seen == [True, False]
    assert not callable(internals.frame_hook())


def test_is_exporting():
    x, model = torch.zeros(2), module_of(lambda self, x: x + 1 if internals.is_exporting() else x)
    assert torch.equal(model(x), x)
    assert torch.equal(compiled(model)(x), x)
    assert torch.equal(torch.export.export(model, (x,), strict=True).module()(x), x + 1)
    assert torch.equal(compiled(model)(x), x)


def test_compiled_frame():
    backend = Kept(lambda gm: internals.compiled_frame())

    def function(x):
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    run = compiled(function, backend=backend)
    run(torch.ones(2))
    assert len(set(backend.seen)) == 2, "two graphs around a break"
    run(torch.ones(3))
    assert set(backend.seen[2:]) <= set(backend.seen[:2]), "the same frames again"
    assert None not in backend.seen
    assert internals.compiled_frame() is None


def test_constant_result():
    three = mock.Mock(return_value=3)
    constant = internals.constant_result(lambda: three())
    run = compiled(lambda x: x * constant(), fullgraph=True)
    assert torch.equal(run(run(torch.ones(2))), torch.full((2,), 9.0))
    three.assert_called_once()  # while Dynamo traces


def test_retry_skipped_code():
    def fail(gm):
        raise RuntimeError("this backend fails")

    backend = Kept(fail)
    run = compiled(add, backend=backend)
    with internals.dynamo_settings(suppress_errors=True):
        for _ in range(2):
            run(torch.ones(1))
        assert len(backend.graphs) == 1, "skipped for good"
        internals.retry_skipped_code()
        run(torch.ones(1))
    assert len(backend.graphs) == 2


def test_forget_code():
    backend = Kept()
    run = compiled(add, backend=backend)
    for size in (1, 2, 2):
        run(torch.ones(size))
    assert add.__code__ in internals.guard_failures()
    assert len(backend.graphs) == 2
    internals.forget_code(add.__code__)
    assert add.__code__ not in internals.guard_failures()
    run(torch.ones(2))
    assert len(backend.graphs) == 3


def test_captured_graphs():
    before, run = internals.captured_graphs(), compiled(add)
    run(run(torch.ones(2)))
    assert internals.captured_graphs() == before + 1


def test_is_full():
    run, full = compiled(add), []
    with internals.dynamo_settings(recompile_limit=2):
        for size in (1, 2):
            full.append(internals.is_full(add))
            run(torch.ones(size))
        full.append(internals.is_full(add))
    assert full == [False, False, True]


def test_guard_failures():
    run = compiled(add)
    for n in range(3):
        run(torch.ones(1), n)
    texts = internals.guard_failures()[add.__code__]
    assert len([text for text in texts if "n == " in text]) >= 2
    assert all(re.match(r"\d+/\d+: ", text) for text in texts), "frame/compilation: guard"


def test_is_runtime_error():
    with pytest.raises(Exception, match="reduction dim") as caught:
        compiled(lambda x: x @ x, fullgraph=True)(torch.ones(2, 3))
    assert internals.is_runtime_error(caught.value)
    assert not internals.is_runtime_error(RuntimeError())


# Graphs and backends


def test_source_of():
    backend = Kept(lambda gm: [internals.source_of(node) for node in gm.graph.find_nodes(op="placeholder")])
    module = nn.Sequential(nn.Linear(2, 2, bias=False))
    torch.compile(module, backend=backend)(torch.ones(1, 2))
    assert any("parameters" in text and "weight" in text for text in backend.seen[0])
    assert internals.source_of(torch.fx.Graph().placeholder("x")) is None


def test_unmark_static():
    module = nn.Module()
    module.register_buffer("step", torch.ones(1))

    def mark(gm):
        (node,) = gm.graph.find_nodes(op="placeholder")
        before = str(node.meta.get("tensor_dict", {}))
        internals.unmark_static(node)
        return "static" in before, "static" in str(node.meta.get("tensor_dict", {}))

    backend = Kept(mark)
    compiled(lambda: module.step + 1, backend=backend)()
    assert backend.seen == [(True, False)]


def test_backend_named():
    result = internals.backend_named("eager")(torch.fx.symbolic_trace(add), [torch.ones(1)])(torch.ones(1))
    assert float(result if isinstance(result, Tensor) else result[0]) == 2
    with pytest.raises(Exception, match="no_such"):
        internals.backend_named("no_such")


@pytest.mark.inductor
@pytest.mark.compiler
def test_compile_with_inductor():
    backend, x = partial(internals.compile_with_inductor, options={"post_grad_custom_post_pass": None}), torch.randn(8)
    ran = compiled(lambda x: x.sin() + 1, backend=backend)(x)
    torch.testing.assert_close(ran, x.sin() + 1)
    with pytest.raises(Exception, match="no_such_option"):
        internals.compile_with_inductor(torch.fx.symbolic_trace(lambda x: (x,)), [x], {"no_such_option": 1})


@pytest.mark.inductor
def test_unlike_loops_unsplit():
    """tests/model/test_inductor.py compiles loops that torch would fail to split."""
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.ir import ComputedBuffer

    def loop(*sizes: int) -> Any:
        buffer = mock.Mock(spec=ComputedBuffer)
        buffer.get_default_sizes_body.return_value = (sizes, ()), None, None
        return mock.Mock(node=buffer)

    alike, unlike = [loop(48, 160), loop(48, 160)], [loop(48, 160), loop(160, 48)]
    with mock.patch.object(CppScheduling, "try_loop_split", return_value="split") as original:
        with internals.unlike_loops_unsplit():
            ran = [CppScheduling.try_loop_split(mock.Mock(), nodes) for nodes in (alike, unlike)]
        assert CppScheduling.try_loop_split is original
    assert ran == ["split", unlike]


def test_split_by_buckets():
    module, x = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4))), torch.ones(1, 64)
    whole, split = Kept(), Kept()
    for backend in (whole, internals.split_by_buckets(split, 64 * 64 * 4)):
        torch.testing.assert_close(torch.compile(copy.deepcopy(module), backend=backend)(x), module(x))
    assert len(whole.graphs) == 1 < len(split.graphs)


def test_functions_cached():
    config = torch._inductor.config
    before = dict(config.unsafe_marked_cacheable_functions)
    with internals.functions_cached({"module.function": "1"}):
        assert config.unsafe_marked_cacheable_functions == {**before, "module.function": "1"}
    assert config.unsafe_marked_cacheable_functions == before


# Autograd


def test_backward_id():
    seen, y = [], torch.ones(1, requires_grad=True) * 2
    y.register_hook(lambda gradient: seen.append(internals.backward_id()))
    for _ in range(2):
        y.backward(retain_graph=True)
    assert internals.backward_id() == -1
    assert min(seen) >= 0
    assert len(set(seen)) == 2, "each backward has a number of its own"


def test_next_sequence_number():
    x = torch.ones(1, requires_grad=True)
    first = internals.next_sequence_number()
    y: Any = x * 2
    assert y.grad_fn._sequence_nr() == first
    assert internals.next_sequence_number() == first + 1


def test_compiled_backwards():
    x = torch.ones(2, requires_grad=True)
    run = compiled(lambda x: (x.sin(), x.cos()), backend="aot_eager")
    earlier = run(x)[0]
    first = internals.next_sequence_number()
    y, z = run(x)
    nodes = internals.compiled_backwards([(y + z + earlier)], first)
    assert [node.name() for node in nodes] == ["CompiledFunctionBackward"]
    assert nodes == {y.grad_fn}
    assert internals.compiled_backwards([x * 2], first) == set()


def test_saved_tensor_hooks_kept():
    def fail(change):
        with internals.saved_tensor_hooks_kept():
            change()
            raise ZeroDivisionError

    hooks = torch._C._autograd
    with pytest.raises(ZeroDivisionError):
        fail(lambda: hooks._saved_tensors_hooks_disable("for good"))
    with torch.autograd.graph.save_on_cpu():
        pass
    with torch.autograd.graph.disable_saved_tensors_hooks("by the user"):
        with pytest.raises(ZeroDivisionError):
            fail(hooks._saved_tensors_hooks_enable)
        with pytest.raises(RuntimeError, match="by the user"):
            torch.autograd.graph.save_on_cpu().__enter__()


def test_saved_tensor_hooks():
    def pack(x):
        return x

    assert internals.saved_tensor_hooks() is None
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, abs):
        assert internals.saved_tensor_hooks() == (pack, abs)
    assert internals.saved_tensor_hooks() is None


def test_checkpointed_regions():
    seen = []

    def function(x):
        with torch.autograd.graph.save_on_cpu():
            hooks = internals.saved_tensor_hooks()
            seen.append(internals.checkpointed_regions())
            assert internals.saved_tensor_hooks() == hooks
        return x.sin()

    def outer(x):
        return checkpoint(function, x, use_reentrant=False)

    x = torch.ones(1, requires_grad=True)
    y = checkpoint(function, x, use_reentrant=False)
    checkpoint(outer, x, use_reentrant=False)
    y.backward()
    (first,), (inner, around), (again,) = seen
    assert again is first
    assert len({first, inner, around}) == 3
    assert internals.checkpointed_regions() == []


def test_saved_in():
    seen = []

    def function(x):
        regions = internals.checkpointed_regions()
        for operation in (torch.neg, torch.sin, torch.neg):
            x = operation(x)
            seen.append(internals.saved_in(regions))
        return x.exp()

    assert internals.saved_in([]) == 0
    checkpoint(function, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    assert seen == [0, 1, 1, 2, 3, 3]  # exp saves another one; then sin is computed again


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_by(reentrant):
    runs = []

    def function(x):
        region = next(iter(internals.checkpointed_regions()), None)
        if reentrant and (frame := inspect.currentframe().f_back) is not None:
            region = frame.f_locals.get("ctx")
        if region is not None and not runs:
            internals.recompute_by(region, lambda call: lambda *args: runs.append("again") or call(*args))
        runs.append("function")
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    checkpoint(function, x, use_reentrant=reentrant).backward()
    assert runs == ["function", "again", "function"]
    assert x.grad == torch.cos(torch.ones(1))


# Transforms and modes


def test_is_functorch_active():
    for transform in (torch.func.grad, torch.func.vmap):
        assert transform(lambda x: x.sum() * internals.is_functorch_active())(torch.ones(2, 2)).any()
    assert not internals.is_functorch_active()


def test_without_dispatch_modes():
    with FlopCounterMode(display=False) as counter:
        with internals.without_dispatch_modes():
            assert not internals.has_dispatch_mode()
            torch.ones(2, 2) @ torch.ones(2, 2)
        assert internals.has_dispatch_mode()
    assert counter.get_total_flops() == 0


def test_without_function_modes():
    class Counting(torch.overrides.TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.seen += 1
            return func(*args)

    class Other(Counting): ...

    outer, inner = Other(), Counting()
    x = torch.ones(2)
    with outer, inner:
        with internals.without_function_modes(Other):
            torch.add(x, x)
        assert (outer.seen, inner.seen) == (0, 1)
        torch.add(x, x)
        assert (outer.seen, inner.seen) == (1, 2)


def test_fake_tensors_silent():
    records, handler = [], logging.Handler()
    handler.emit = records.append

    def fail():
        with internals.FakeTensorMode(), pytest.raises(RuntimeError):
            torch.ones(2, 3) @ torch.ones(2, 3)

    with mock.patch.object(logging.getLogger(internals.FakeTensor.__module__), "handlers", [handler]):
        with internals.fake_tensors_silent():
            fail()
        assert records == []
        fail()
        assert records != []


# Operators and tensors


def test_is_alias():
    with internals.FakeTensorMode():
        x = torch.ones(2, 2)
        assert internals.is_alias(x, x[0])
        assert not internals.is_alias(x, x.clone())


def test_fused_adamw():
    p, g = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 0.25])
    m, v, step = torch.tensor([0.1, 0.0]), torch.tensor([0.2, 0.3]), torch.tensor(3.0)
    lr, beta1, beta2, eps, decay = 0.1, 0.9, 0.99, 1e-8, 0.01
    m_next, v_next = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    hats = m_next / (1 - beta1**3), v_next / (1 - beta2**3)
    expected = p * (1 - lr * decay) - lr * hats[0] / (hats[1].sqrt() + eps)
    internals.fused_adamw([p], [g], [m], [v], [step], lr=lr, beta1=beta1, beta2=beta2, eps=eps, weight_decay=decay)
    torch.testing.assert_close(p, expected)
    torch.testing.assert_close((m, v), (m_next, v_next))


# Several processes


@pytest.fixture
def group(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_active_ddp():
    seen, layer = [], nn.Linear(2, 2)
    layer.register_forward_pre_hook(lambda *_: seen.append(internals.active_ddp()))
    wrapper = DistributedDataParallel(layer)
    wrapper(torch.ones(1, 2))
    assert seen == [wrapper]
    assert internals.active_ddp() is None


@pytest.mark.usefixtures("group")
def test_fsdp_dtype():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    cast = fully_shard(nn.Linear(2, 2), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert internals.fsdp_dtype(cast) is torch.bfloat16
    assert internals.fsdp_dtype(fully_shard(nn.Linear(2, 2), mesh=mesh)) is None
