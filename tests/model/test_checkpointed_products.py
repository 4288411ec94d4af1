"""Products in the body of a checkpointed function, and behind a graph break in the model's own forward."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fp4graph
from fp4graph.errors import CaptureError
from tests.helpers.policies import one_rule

pytestmark = pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")

OPS = ["linear", "matmul"]
POLICIES = {
    "nearest": one_rule(quantize={"block": 16, "rounding": "nearest"}, match={"op": OPS}),
    "stochastic": one_rule(quantize={"block": 16, "rounding": "stochastic"}, match={"op": OPS}),
    "hold_steps": one_rule({"tensor_scaling": {"hold_steps": 2}}, quantize={"block": 16}, match={"op": ["linear"]}),
}


def borrowed(layer, x):
    """Multiply with the weight of a layer that is not called."""
    return F.linear(x, layer.weight, layer.bias)


def twice(layer, x):
    return layer(torch.tanh(layer(x)))


def attention(layer, x):
    return (x @ x.mT).softmax(-1) @ x


def layer_then_attention(layer, x):
    return attention(layer, layer(x))


class Region(nn.Module):
    """Runs ``body`` in a method: under a checkpoint, ``reentrant`` or not, or without a checkpoint if it is None."""

    def __init__(self, body, reentrant):
        super().__init__()
        self.layer, self.body, self.reentrant = nn.Linear(32, 32), body, reentrant

    def run(self, x):
        return self.body(self.layer, x)

    def forward(self, x):
        return self.run(x) if self.reentrant is None else checkpoint(self.run, x, use_reentrant=self.reentrant)


class Net(nn.Module):
    def __init__(self, body, reentrant):
        super().__init__()
        self.first, self.region, self.last = nn.Linear(32, 32), Region(body, reentrant), nn.Linear(32, 32)

    def forward(self, x):
        return self.last(self.region(self.first(x)))


def as_it_is(function, *args):
    return function(*args)


def trained(make, policy, *, stance=None, strict=False, around=as_it_is):
    """Return outputs and gradients of two training steps, with the model's calls in the checkpoint ``around``."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = fp4graph.apply(make(), policy, backend="eager", seed=1, strict=strict)
    x, results = torch.randn(2, 8, 32).requires_grad_(), []
    for _ in range(2):
        with nullcontext() if stance is None else torch.compiler.set_stance(stance):
            y = around(model, x)
            y.square().sum().backward()
        results += [y.detach(), *(t.grad.clone() for t in (x, *model.parameters()) if t.grad is not None)]
    return [*results, *model.buffers()]


@pytest.mark.parametrize("stance", [None, "force_eager"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("body", [borrowed, twice, attention, layer_then_attention])
def test_a_checkpointed_function_trains_as_without_a_checkpoint(body, policy, reentrant, stance):
    plain = trained(lambda: Net(body, None), POLICIES[policy])
    checkpointed = trained(lambda: Net(body, reentrant), POLICIES[policy], stance=stance)
    assert len(plain) == len(checkpointed)
    assert all(map(torch.equal, plain, checkpointed))


class Computes(nn.Module):
    """Computes a weight behind a graph break: the first call of the model begins again."""

    def __init__(self):
        super().__init__()
        self.first, self.layer, self.scale = nn.Linear(32, 32), nn.Linear(32, 32), nn.Parameter(torch.ones(32, 1))

    def begin(self, x):
        return self.first(x).tanh()

    def forward(self, x):
        h = self.begin(x)
        torch._dynamo.graph_break()
        return h + F.linear(h, self.layer.weight * self.scale).tanh()


class Shifts(Computes):
    """Saves no tensor before the break."""

    def begin(self, x):
        return x + self.first.bias


@pytest.mark.parametrize("saved", [None, [torch.ops.aten.tanh.default]], ids=["all recomputed", "selective"])
def test_a_call_in_a_checkpoint_does_not_begin_again(saved):
    """torch would count what the first beginning has saved, and raise CheckpointError in the backward."""
    more = {} if saved is None else {"context_fn": partial(create_selective_checkpoint_contexts, saved)}
    run, calls = partial(checkpoint, use_reentrant=False, **more), []

    def called_once(model, x):
        if not calls:
            with pytest.raises(CaptureError, match=r"must begin again.* Call the model once without the checkpoint"):
                run(model, x)
        calls.append(x)
        return (run if calls[1:] else as_it_is)(model, x)

    plain, again = (trained(Computes, POLICIES["stochastic"], around=each) for each in (as_it_is, called_once))
    assert len(plain) == len(again)
    assert all(map(torch.equal, plain, again))


def test_a_call_in_a_checkpoint_that_has_saved_nothing_begins_again():
    around = (as_it_is, partial(checkpoint, use_reentrant=False))
    plain, again = (trained(Shifts, POLICIES["stochastic"], around=each) for each in around)
    assert len(plain) == len(again)
    assert all(map(torch.equal, plain, again))


def nested(outer, inner):
    """Return a body of two checkpointed functions, ``outer`` and ``inner``, that begin with the same operation."""

    def body(layer, x):
        def whole(x):
            y = inner(borrowed, layer, x)
            return borrowed(layer, y.tanh()) + layer(y)

        return outer(whole, x)

    return body


def saved_on_cpu(function, *args):
    with torch.autograd.graph.save_on_cpu():
        return function(*args)


@pytest.mark.parametrize(
    "inner", [saved_on_cpu, *(partial(checkpoint, use_reentrant=r) for r in (False, True))], ids=["cpu", "non", "re"]
)
def test_checkpoints_that_begin_together_train_as_without(inner):
    """The second product of the outer function drew the noise of a third one when it was computed again."""
    outer = partial(checkpoint, use_reentrant=False)
    plain = trained(lambda: Net(nested(as_it_is, as_it_is), None), POLICIES["stochastic"], stance="force_eager")
    again = trained(lambda: Net(nested(outer, inner), None), POLICIES["stochastic"], stance="force_eager")
    assert len(plain) == len(again)
    assert all(map(torch.allclose, plain, again))  # a reentrant checkpoint adds gradients in another order


@pytest.mark.parametrize(
    ("outer", "inner"),
    [(False, False), (True, False), (False, True), (True, True)],
    ids=["non-non", "re-non", "non-re", "re-re"],
)
def test_calls_of_the_model_in_two_checkpoints_count_once(outer, inner):
    """The outer checkpoint computes the inner one again, which is another region then. A second call in a reentrant
    checkpoint had the noise of the first, and other noise when it was computed again."""

    def steps(outer, inner):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = fp4graph.apply(Net(twice, None), POLICIES["stochastic"], backend="eager", seed=1)
        x = torch.randn(2, 8, 32).requires_grad_()
        for _ in range(2):
            outer(lambda x: inner(lambda x: model(model(x)), model(x)).tanh(), x).square().sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    plain = steps(as_it_is, as_it_is)
    again = steps(partial(checkpoint, use_reentrant=outer), partial(checkpoint, use_reentrant=inner))
    assert all(map(torch.allclose, plain, again))


class Breaks(nn.Module):
    """Breaks the graph between its own products, and calls a layer."""

    def __init__(self, *, breaks=True):
        super().__init__()
        self.layer, self.other, self.breaks = nn.Linear(32, 32), nn.Linear(32, 32), breaks
        self.matrix = nn.Parameter(torch.randn(32, 32) / 6)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        y = F.dropout(self.norm(self.layer(x)), 0.1)
        if self.breaks:
            torch._dynamo.graph_break()
        y = y @ self.matrix
        return borrowed(self.other, y) + attention(None, y)


@pytest.mark.parametrize("ops", [OPS, ["linear"]])
@pytest.mark.parametrize(
    ("wrap", "says"), [(lambda net: net, "this forward"), (nn.Sequential, "module '0'")], ids=["root", "part"]
)
def test_products_that_a_graph_break_parts_from_their_module_train_uncompiled(wrap, says, ops):
    policy = one_rule(quantize={"block": 16, "rounding": "stochastic"}, match={"op": ops})
    with pytest.warns(fp4graph.PolicyWarning, match=rf"{says} runs uncompiled.*graph break"):
        broken = trained(lambda: wrap(Breaks()), policy)
    whole = trained(lambda: wrap(Breaks(breaks=False)), policy)
    assert all(map(torch.equal, whole, broken))
    with pytest.raises(fp4graph.CaptureError, match=r"graph break parts that call.*leave out strict=True"):
        trained(lambda: wrap(Breaks()), policy, strict=True)


def test_a_matrix_of_no_layer_is_named_where_techniques_keep_state():
    policy = one_rule(
        {"q_ema": {"beta": 0.9}}, quantize={"block": 16}, operands={"backward": {"rounding": "stochastic"}}
    )
    for stance in (None, "force_eager"):
        with pytest.raises(fp4graph.CaptureError, match=r"technique q_ema keeps state.*parameter 'matrix'"):
            trained(Breaks, policy, stance=stance)


@pytest.mark.parametrize("policy", ["stochastic", "hold_steps"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("outer", [None, False])
def test_a_weight_may_be_an_argument_of_the_checkpoint(outer, reentrant, policy):
    """A recomputation gets a detached argument, of a reentrant checkpoint and of one in another checkpoint."""

    def lends(layer, x):
        return checkpoint(F.linear, x * 1.0, layer.weight, layer.bias, use_reentrant=reentrant)

    plain = trained(lambda: Net(borrowed, None), POLICIES[policy], stance="force_eager")
    again = trained(lambda: Net(lends, outer), POLICIES[policy], stance="force_eager")
    assert len(plain) == len(again)
    assert all(map(torch.equal, plain, again))


@pytest.mark.parametrize("reentrant", [False, True])
def test_tensors_without_memory_of_their_own_are_computed_again(reentrant):
    """Asking a sparse tensor, or one inside of vmap, for its address is an error."""

    def rows(layer, matrix, x):
        return torch.vmap(torch.sin)(layer(torch.sparse.mm(matrix, x)))

    def body(run):
        return lambda layer, x: run(rows, layer, torch.eye(8).to_sparse(), x[0])

    bodies = body(as_it_is), body(partial(checkpoint, use_reentrant=reentrant))
    nets = (partial(Net, each, None) for each in bodies)
    plain, again = (trained(net, POLICIES["stochastic"], stance="force_eager") for net in nets)
    assert len(plain) == len(again)
    assert all(map(torch.equal, plain, again))
