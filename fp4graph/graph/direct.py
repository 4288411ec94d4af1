"""The graph pass without a graph: operations run as they are called, and the products among them are quantized.

It serves forwards that no compiler captured. Each operation becomes a node outside of any graph, which
:mod:`~fp4graph.graph.find`, :mod:`~fp4graph.graph.plan` and :mod:`~fp4graph.graph.replace` read like a node of a
captured graph. So the decisions, the noise and the bits are those of the captured graph.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.fx import Node
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction

from fp4graph import torch_internals
from fp4graph.errors import CaptureError
from fp4graph.graph import experts, products, roles
from fp4graph.graph.arguments import in_order
from fp4graph.graph.describe import Describer
from fp4graph.graph.found import FoundProduct, FoundWork, Markers
from fp4graph.graph.marker import Marker, Tag
from fp4graph.graph.names import Names
from fp4graph.graph.nodes import Nodes
from fp4graph.graph.observe import Recording, current_substitute, numbered
from fp4graph.graph.operations import Verdict, tag_of
from fp4graph.graph.plan import Planner, plan_once
from fp4graph.graph.products import PRODUCER, value_of
from fp4graph.graph.refusals import rule_that_keeps
from fp4graph.graph.replace import SiteCall, UnmarkedWeight, call_of
from fp4graph.graph.writes import writes
from fp4graph.ops.observe import observed
from fp4graph.policy import Policy
from fp4graph.torch_internals import pytree

#: Key in a node's meta data: the site at the node, a quantized linear layer of no known role.
_QUANTIZED = "fp4graph_quantized"


class _Kept(Exception):
    """Raised where no rule quantizes a product that is written out, so that the model's own operation runs."""


class Direct(TorchFunctionMode):
    """A forward of a model, or of a part of it, whose operations are run and quantized one by one.

    Args:
        policy: the policy of the phase in force.
        names: the names of the model's modules and parameters.
        whole_model: whether the forward is one of the whole model. Then a tensor that no operation of the forward made
            is an input of the model; otherwise an operation outside of the part may have made the tensor.
        produced: maps tensors that earlier passes returned to the operations that made them.
        idle: the kinds of operations that have no matrix work; the pass adds to them.
        carries: marks the weight of a module that the forward uses without calling the module; returns whether this
            succeeded.
        recomputes: called with a checkpointed region that begins in the forward, and a copy of the pass at that place.
        lists: also list work that every policy keeps.
        recording: sees the sites as they run, or None.
        first_occurrence: number of sites of each module that ran before.

    Attributes:
        planner: the decisions of the pass.
        marked: names of the modules that were called.
    """

    def __init__(
        self,
        policy: Policy,
        names: Names,
        *,
        whole_model: bool,
        produced: MutableMapping[Tensor, str | None],
        idle: set[Any],
        carries: Callable[[UnmarkedWeight], bool],
        recomputes: Callable[[Any, Direct], None],
        lists: bool = False,
        recording: Recording | None = None,
        first_occurrence: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.planner = Planner(policy, first_occurrence)
        self.marked: set[str | None] = set()
        self._policy, self._names, self._whole_model = policy, names, whole_model
        self._idle, self._recording, self._carries, self._lists = idle, recording, carries, lists
        self._recomputes = recomputes
        self._shown: Counter[str] = Counter()
        self._describer = Describer(names, policy.may_quantize)
        self._markers = Markers()
        self._nodes = Nodes(names, produced)
        self._stack: dict[str, tuple[str, type]] = {}
        self._tag: str | None = None
        self._backward = torch_internals.backward_id()
        self._functions_outside = len(_functions())
        self._pack: Any = None  # the hook for saved tensors at the last operation
        self._trains = torch.is_grad_enabled()  # else nothing in the pass is recomputed by itself
        self._regions = {id(region): region for region in self._running_regions()}

    def copy(self) -> Direct:
        """Return a pass that runs the operations from here on again, with the same noise."""
        again = copy.copy(self)
        again.planner, again.marked = Planner(self._policy, self.planner.occurrences), set()
        again._markers, again._stack = self._markers.copy(), dict(self._stack)
        again._describer = Describer(self._names, self._policy.may_quantize)
        again._recording, again._lists, again._regions, again._pack = None, False, {}, None
        return again

    def begin_again(self) -> Direct:
        """Return a :meth:`copy` for the backward that runs now."""
        again = self.copy()
        again._backward, again._functions_outside = torch_internals.backward_id(), len(_functions())
        again._trains = torch.is_grad_enabled()
        again._regions = {id(region): region for region in again._running_regions()}
        return again

    def look_for_region(self) -> None:
        """Report each checkpointed region that has begun: its recomputation, in the backward, needs a pass too."""
        if not self._trains:
            return
        hooks = torch_internals.saved_tensor_hooks()
        if torch.is_grad_enabled() and (hooks is None or hooks[0] is self._pack):
            return  # a region has hooks of its own; only those of a reentrant checkpoint run without gradients
        self._pack = None if hooks is None else hooks[0]
        for region in self._running_regions():
            if id(region) not in self._regions:
                self._regions[id(region)] = region
                self._recomputes(region, self.copy())

    def _running_regions(self) -> list[Any]:
        """Return the checkpointed regions that run now, by torch's objects.

        Several may have begun since the last operation: a region may begin with another one.
        """
        regions = torch_internals.checkpointed_regions()
        if not torch.is_grad_enabled():  # as in the forward of a reentrant checkpoint
            regions += [ctx for function, ctx in _forwards() if function is CheckpointFunction]
        return regions

    @contextmanager
    def inside(self, module: nn.Module) -> Iterator[None]:
        """Take the operations of this context for operations of ``module``."""
        caller = f"{id(module)}@{len(self._stack)}"
        self._stack[caller] = ("", type(module))
        try:
            yield
        finally:
            del self._stack[caller]

    def mark(
        self,
        module: nn.Module,
        name: str,
        tag: Tag,
        key: Tensor,
        step: Tensor,
        weights: Sequence[Tensor],
        state: Sequence[Tensor],
    ) -> None:
        """Take the marker of a module that is about to run; the arguments are those of ``fp4graph::mark``."""
        held = self._nodes.held
        nodes = held(key), held(step), [held(w) for w in weights], [held(entry) for entry in state]
        self._markers.add(Marker(tag, *nodes, module.training, id(module), name))
        self.marked.add(name)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = in_order(func, args, kwargs or {})
        exact = partial(func, *args, **kwargs)
        if getattr(func, "__name__", "") == "__set__":
            self._describer.writes += 1  # x.data = y
        # A backward inside of this forward (double backward, a penalty) runs operations of fp4graph, not of the model.
        of_model = torch_internals.backward_id() == self._backward
        if not of_model or (node := self._nodes.of_call(exact, inputs := dict[Node, Tensor]())) is None:
            return exact()
        self.look_for_region()
        node.meta["nn_module_stack"] = self._stack
        if self._tag is not None:
            node.meta["fp4graph_op"] = self._tag
        if node.target in roles.CHOICES:
            _check_router(node)
        without_value = [n for n in inputs if "example_value" not in n.meta]
        for n in without_value:
            n.meta["example_value"] = inputs[n]
        written = writes(node)
        self._describer.writes += written
        try:
            if (function := self._opened(node)) is not None:
                return self._run_opened(node, partial(function, *exact.args, **exact.keywords))
            if (gathered := self._describer.written_out(node, self._markers)) is not None:
                try:
                    return self._run_opened(node, partial(gathered.function, *gathered.tensors))
                except _Kept:
                    result = exact()
            elif (call := self._call(node, inputs)) is not None:
                result = self._run(call, exact)
            elif node.target is experts.EXPERTS_MM:
                raise _Kept
            else:
                result = exact()
        finally:
            for n in without_value:
                del n.meta["example_value"]  # a node must not keep an activation alive
        experts.follow(node, result, inputs, self._describer.writes)
        self._nodes.remember(result, node, written=written)
        return result

    def _run_opened(self, node: Node, function: Callable[[], Any]) -> Any:
        """Run ``function`` in place of ``node``; the pass sees each operation of ``function``."""
        tag = self._tag
        self._tag = tag_of(node) or tag
        try:
            with self:
                return function()
        finally:
            self._tag = tag

    def finish(self, result: Any) -> None:
        """Remember which operations made the tensors that this forward returns."""
        self._nodes.finish(result)

    def _opened(self, node: Node) -> Callable[..., Any] | None:
        """Return a function that computes the opaque operation ``node`` with its products written out, or None."""
        if node.target is F.multi_head_attention_forward:
            return _attention_forward
        return self._describer.opening(node, self._markers)

    def _call(self, node: Node, inputs: dict[Node, Tensor]) -> SiteCall | None:
        """Return the call that replaces ``node``, or None where the operation itself runs."""
        kind = (node.op, node.target, *((x.dim(), n.meta.get(experts.AXES)) for n, x in inputs.items()))
        if kind in self._idle:
            return None
        work = self._describer.describe(node, self._markers)
        if work is None:
            self._idle.add(kind)
            return None
        if isinstance(work, FoundWork) and work.verdict is Verdict.KEEP and not self._lists:
            return None
        planned = self.planner.plan([work])
        if self.planner.refused is not None:
            raise self.planner.refused
        if isinstance(work, FoundProduct):
            n, k = work.view.out_features, work.view.in_features
            node.meta[roles.NARROWS] = n is not None and k is not None and n < k
            _check_known(work, self._policy, whole_model=self._whole_model)
        if not planned:
            return None
        if planned[0].found.has_weight and work.view.role is None:
            node.meta[_QUANTIZED] = work.view
        if len(functions := _functions()) > self._functions_outside:
            _check_function(functions[0], planned[0].found)
            return None
        try:
            return call_of(planned[0], planned[0].found.product)
        except UnmarkedWeight as error:
            if not self._carries(error):
                raise
        found = self._describer.describe(node, self._markers)
        assert isinstance(found, FoundProduct)
        return call_of(replace(planned[0], found=found), found.product)

    def _run(self, call: SiteCall, exact: partial[Tensor]) -> Tensor:
        inputs: list[Any] = [None if node is None else value_of(node) for node in call.inputs]
        state = [_viewed(node, views) for node, views in call.state]
        keywords = {key: value_of(value) if isinstance(value, Node) else value for key, value in call.keywords.items()}

        def quantized(a: Tensor, b: Tensor) -> Tensor:
            return call.function(a, b, *inputs[2:], call.salt, *state, site=call.site, **keywords)

        if (substitute := current_substitute()) is not None:
            return substitute(call.site, inputs[0], inputs[1], quantized, _of_factors(exact, inputs[:2]))
        if self._recording is None:
            return quantized(inputs[0], inputs[1])
        name = numbered(call.site, self._shown[call.site])
        self._shown[call.site] += 1
        with observed(self._recording.operands(name)):
            y = quantized(inputs[0], inputs[1])
        self._recording.output(name, y)
        return y


def _of_factors(call: partial[Tensor], factors: Sequence[Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return ``call``, a product of two ``factors``, as a function of them."""

    def product(*others: Tensor) -> Tensor:
        replaced = dict(zip(map(id, factors), others, strict=True))
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: replaced.get(id(x), x), (call.args, call.keywords))
        return call.func(*args, **kwargs)

    return product


def _check_known(found: FoundProduct, policy: Policy, *, whole_model: bool) -> None:
    """Raise CaptureError where the decision depends on facts that only a graph shows."""
    view, place = found.view, str(found.view)
    unowned = found.has_weight and found.owner is None and isinstance(value_of(found.product.b), nn.Parameter)
    if unowned and policy.quantizes:
        raise CaptureError(
            "its weight is a parameter that the model did not have at fp4graph.apply(); call fp4graph.apply(model, "
            "policy) again, which keeps state where it fits, and prepare_optimizer again",
            site=place,
        )
    if whole_model or view.producer is not None or not _from_outside(found.product.a):
        return
    training = found.marked is None or found.marked.marker.training
    decisions = policy.decide_weight(view)
    plans = {plan_once(site, d.rule, training=training) if d.rule.quantizes else None for site, d in decisions}
    if len(plans) > 1:
        raise CaptureError(
            "what the policy does here (a rule with 'producer', or a technique such as smooth_swiglu) depends on "
            "what computes the input of this product, which is unknown because this part of the model runs by "
            "itself; call the model, with experts_implementation='grouped_mm' for experts in transformers, or tell "
            "the rules apart by module instead of producer",
            site=place,
        )


def _check_router(choice: Node) -> None:
    """Raise CaptureError where ``choice`` shows that a quantized product is a router, which captured graphs keep."""
    for node in roles.chosen_from(choice):
        if (view := node.meta.get(_QUANTIZED)) is not None:
            raise CaptureError(
                "its output chooses by top-k, so it is a router, which a compiled graph keeps; it was quantized "
                f"before the top-k showed that. To keep it here too, {rule_that_keeps('router', view.module)}",
                site=str(view),
            )


def _check_function(function: Any, found: FoundProduct) -> None:
    """Raise CaptureError where the forward of a custom autograd function multiplies with a weight.

    The pass does not see the products of the function's backward.
    """
    if found.has_weight:
        raise CaptureError(
            f"the autograd function {function.__name__} multiplies with a parameter, and its backward would silently "
            f"run in high precision. To keep it, {rule_that_keeps('function', found.view.module)}",
            site=str(found.view),
        )


def _functions() -> list[Any]:
    """Return the custom autograd functions whose forwards are running, innermost first; checkpoints are left out."""
    return [function for function, _ in _forwards() if function is not CheckpointFunction]


def _forwards() -> Iterator[tuple[Any, Any]]:
    """Yield each autograd function whose forward is running, innermost first, and its context if it gets one."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward":
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            owner = frame.f_globals.get(code.co_qualname.rpartition(".")[0])  # a class with setup_context() gets no ctx
            if isinstance(first, FunctionCtx):
                yield getattr(first, "_forward_cls", type(first)), first
            elif isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
                yield owner, None
        frame = frame.f_back


def _from_outside(node: Node) -> bool:
    """Return whether ``node`` is a view of, or rows of, a tensor with an unknown producer."""
    while (source := products.rows_of(node)) is not None:
        node = source
    return node.op == "placeholder" and PRODUCER not in node.meta


def _viewed(node: Node, views: Sequence[Node]) -> Tensor:
    """Return the tensor of ``node`` through the chain of ``views``."""
    x: Any = value_of(node)
    for view in views:
        args, kwargs = pytree.tree_map_only(Node, value_of, (view.args[1:], dict(view.kwargs)))
        target: Any = view.target
        x = getattr(x, target)(*args, **kwargs) if isinstance(target, str) else target(x, *args, **kwargs)
    return x  # type: ignore[no-any-return]


def _without_overrides(function: Any) -> Callable[..., Any]:
    """Return a copy of a Python function of torch that does not ask for overrides; operations inside the copy do."""
    scope = {**function.__globals__, "has_torch_function": lambda *_: False}
    copy = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_attention_forward = _without_overrides(F.multi_head_attention_forward)
