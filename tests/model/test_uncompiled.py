"""Every way to run an applied model computes what the compiled call computes: outputs, gradients, weights and state."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import SwinTransformer

from fp4graph.graph.blocks import pattern_of
from fp4graph.model.runtime import runtime_of
from fp4graph.technique.registry import default_registry
from tests.helpers import experts, models
from tests.helpers.breaks import Breaks, Disables, Logs
from tests.helpers.experts import Mixture
from tests.helpers.long import LONG
from tests.helpers.models import Mlp, module_of
from tests.helpers.policies import FEW, TIES_UP, depth_of, one_rule, without_experts
from tests.helpers.training import applied, assert_equal, prepared, saved_whole, train, uncompiled

pytestmark = pytest.mark.slow

OPS = ["linear", "grouped"]
STOCHASTIC = one_rule(quantize={"block": 16, "rounding": "stochastic"}, match={"op": ["linear", "matmul", "sdpa"]})
FIRST = {"name": "first", "match": {"op": OPS, "first_blocks": 1}, "keep": "sensitive"}
LATER = {"backward": {"rounding": "stochastic"}, "dgrad.weight": {"source": "fprop"}}
of_experts = partial(one_rule, op=OPS, quantize=TIES_UP, operands=LATER)
#: Policies that are not shipped.
POLICIES = {
    "stochastic": STOCHASTIC,
    "nearest": one_rule(quantize={"block": 16, "rounding": "nearest"}, op=OPS),
    "first block kept": STOCHASTIC | {"rules": [FIRST, *STOCHASTIC["rules"]]},
    "q_ema": of_experts({"q_ema": {"beta": 0.9}}),
    "q_ramping": of_experts({"q_ramping": {"t_update": 4, "t0": 2, "n_max": 2, "k1": 1.0}}),
    "dampen": of_experts({"dampen": {"strength": 0.1}}),
    "freeze": of_experts({"freeze": {"threshold": 0.01}}),
    "shared scales": of_experts({"tensor_scaling": {"share": "siblings"}}),
    "hadamard": of_experts("tensor_scaling", {"hadamard": {"block": 16}}),
}


class Borrows(Mlp):
    """Multiplies with the weights of its layers, without calling them."""

    def forward(self, x):
        hidden = self.activation(F.linear(x, self.first.weight, self.first.bias))
        return torch.addmm(self.second.bias, hidden, self.second.weight.t())


@torch.compiler.disable
def disabled(net, *args):
    return net(*args)


class Branches(nn.Module):
    """Calls a branch without gradients between two calls of one layer; Dynamo is disabled in all three calls."""

    def __init__(self):
        super().__init__()
        self.online, self.target, self.last = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x):
        first = disabled(self.online, x)
        with torch.no_grad():
            disabled(self.target, x)
        return self.last(first - disabled(self.online, x))  # self.last would see 0 if the calls drew the same noise


def owner():
    """Return a model with a matrix of its own. On many tokens it multiplies in a loop that Dynamo skips."""

    def forward(self, x):
        if x.shape[0] <= 8:
            return F.linear(x, self.w)
        for _ in range(2):
            x = F.linear(x, self.w)
            torch._dynamo.graph_break()
        return x

    return nn.Sequential(nn.Linear(64, 64), module_of(forward, w=nn.Parameter(torch.randn(64, 64) / 6)))


def attends():
    """Return a model with attention and products in every spelling."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v)
        x = x + torch.einsum("bik,bkd->bid", torch.einsum("bid,bkd->bik", q, k).softmax(-1), v)
        x = x @ self.own_weight.t() + torch.baddbmm(x, q @ k.mT, v, alpha=0.1)
        return self.layer(x + self.attention(x, x, x, need_weights=False)[0])

    layers = {"attention": nn.MultiheadAttention, "layer": partial(nn.TransformerEncoderLayer, dim_feedforward=64)}
    layers = {name: make(64, 2, dropout=0.0, batch_first=True) for name, make in layers.items()}
    return module_of(forward, qkv=nn.Linear(64, 192), own_weight=nn.Parameter(torch.randn(64, 64) / 8), **layers)


class Broken(nn.Module):
    """Calls a module that breaks the graph between two layers."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = Breaks(64, 96, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.out(self.inner(x))


class Stack(nn.Module):
    def __init__(self, block, *sizes, depth=2):
        super().__init__()
        self.blocks = nn.ModuleList(block(*sizes) for _ in range(depth))
        torch.manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.15)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def perceptrons(kind):
    return partial(Stack, kind, 64, 96, 64, F.gelu)


def of_timm(name, **sizes):
    return timm.create_model(name, **{"img_size": 32, "embed_dim": 64, "num_heads": 2, "num_classes": 10, **sizes})


class EncoderDecoder(nn.Transformer):
    def __init__(self):
        super().__init__(64, 2, 1, 2, 128, dropout=0.0, batch_first=True)

    def forward(self, x):
        return super().forward(x, x)


def floats(*shape):
    return lambda seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed), requires_grad=True),)


def words(seed):
    return (torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(seed)),)


def more_each_step(seed):
    return floats(8 + 2 * seed, 64)(seed)


vectors, images, sequences = floats(8, 64), floats(2, 3, 32, 32), floats(2, 8, 64)


@dataclass(frozen=True)
class Case:
    """A model, its batch of each step, and its reference: this case or another, in ``mode``."""

    make: Callable[[], nn.Module]
    batch: Callable[[int], Any] = vectors
    reference: str | None = None
    mode: str = "call"
    steps: int = 3


of_mixtures = {"batch": experts.tokens, "steps": 6}


def loop(checkpointed=None, repeats=1, reentrant=False):
    make = partial(Mixture, "loop", 2, checkpointed, repeats=repeats, reentrant=reentrant)
    # A second run of a graph in a forward has a step tensor of its own (docs/techniques.md); a checkpoint does not.
    mode = "uncompiled" if checkpointed == "block" and repeats == 2 else "call"
    return Case(make, experts.tokens, "loop twice" if repeats == 2 else "loop", mode)


CASES = {
    "vit": Case(models.vit, images),
    "deep vit": Case(partial(models.vit, depth=3), images),
    "llama": Case(models.llama, words),
    "deep llama": Case(partial(models.llama, num_hidden_layers=3), words),
    "calls": Case(perceptrons(Mlp)),
    "borrows": Case(perceptrons(Borrows), reference="calls"),
    "disables": Case(perceptrons(Disables), reference="calls"),
    "logs": Case(perceptrons(Logs), reference="calls"),
    # Behind a graph break one graph could wrongly serve all blocks: by default Dynamo ignores their hooks.
    "broken": Case(partial(Stack, Broken, depth=5)),
    "branches": Case(partial(Stack, Branches)),
    "owner": Case(owner, more_each_step),
    "linear": Case(partial(nn.Linear, 64, 64)),
    "one block under two names": Case(lambda: nn.Sequential(*[Mlp(64, 96, 64, F.gelu)] * 2)),
    "attends": Case(attends, sequences),
    "attends, in evaluation": Case(lambda: attends().eval(), sequences),
    "grouped": Case(partial(Mixture, "grouped", 3), **of_mixtures),
    "gathered": Case(partial(Mixture, "gathered", 3), reference="grouped", **of_mixtures),
    "gathered, checkpointed": Case(partial(Mixture, "gathered", 3, "block"), reference="grouped", **of_mixtures),
    "loop": loop(),
    "loop, recomputed experts": loop("experts"),
    "loop, recomputed blocks": loop("block"),
    "loop, reentrant experts": loop("experts", reentrant=True),
    "loop, reentrant blocks": loop("block", reentrant=True),
    # Never reentrant: such a checkpoint cannot tell two calls of a module apart, which then share their noise.
    "loop twice": loop(repeats=2),
    "loop twice, recomputed experts": loop("experts", repeats=2),
    "loop twice, recomputed blocks": loop("block", repeats=2),
    "beit": Case(partial(of_timm, "beit_base_patch16_224", patch_size=8, depth=2), images),
    "eva02": Case(partial(of_timm, "eva02_tiny_patch14_224", patch_size=8, depth=2), images),
    "swin v2": Case(
        partial(
            of_timm, "swinv2_tiny_window8_256", window_size=4, embed_dim=32, depths=(2, 2), num_heads=(2, 4),
            drop_path_rate=0.0,
        ),
        images,
    ),
    "torchvision's swin": Case(
        partial(SwinTransformer, [4, 4], 32, [2, 2], [2, 4], [4, 4], stochastic_depth_prob=0.0), images
    ),
    "encoder and decoder": Case(EncoderDecoder, sequences),
}  # fmt: skip


class Whole(nn.Module):
    """Calls ``net``, through ``way`` if there is one."""

    def __init__(self, net: nn.Module, way: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.net, self.way = net, way

    def forward(self, *args):
        y = self.net(*args) if self.way is None else self.way(self.net, *args)
        return getattr(y, "logits", y)

    def encode(self, *args):
        return self.forward(*args)

    def calls_itself(self, *args):
        return self(*args)


non_reentrant, reentrant = (partial(checkpoint, use_reentrant=each) for each in (False, True))
again = partial(applied, seed=3, total_forwards=20)


def carried(twin, optimizer):
    """Return the model with a new optimizer that has the state of ``optimizer``."""
    second = prepared(twin)
    second.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, second


def copied(model, optimizer, policy, case):
    """Continue with a copy, after a step of the original."""
    twin, second = carried(copy.deepcopy(model), optimizer)
    train(model, optimizer, [case.batch(99)])
    return twin, second


def copied_and_applied(model, optimizer, policy, case):
    return carried(again(copy.deepcopy(model), policy), optimizer)


def resumed(model, optimizer, policy, case):
    twin = again(Whole(case.make()), policy)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    return carried(twin, optimizer)


def pickled(model, optimizer, policy, case):
    return carried(again(saved_whole(model), policy), optimizer)


def evaluated(model, optimizer, policy, case):
    """Evaluate, which draws no noise and counts no forward."""
    with torch.inference_mode():
        model.eval()(*case.batch(99))
    return model.train(), optimizer


def assigned(model, optimizer, policy, case):
    """Replace the weights by others of the same values."""
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    return carried(model, optimizer)


@dataclass(frozen=True)
class Mode:
    """A way to run a model.

    Attributes:
        way: how the model's forward calls its part.
        run: runs the model, or a part of it.
        around: the context of each forward.
        options: of ``fp4graph.apply``.
        between: replaces the model and its optimizer before the last two steps.
        before: a policy that is applied first.
    """

    way: Callable[..., Any] | None = None
    run: Callable[..., Any] = lambda model, *args: model(*args)
    around: Callable[[], Any] = nullcontext
    options: dict[str, Any] = field(default_factory=dict)
    between: Callable[..., Any] | None = None
    before: str | None = None


def by_turns(model, x):
    return (model.encode if runtime_of(model).count % 2 else model)(x)


def by_user(model, x):
    return torch.compile(model, backend="aot_eager")(x)


force_eager = partial(torch.compiler.set_stance, "force_eager")
MODES = {
    "call": Mode(),
    "uncompiled": Mode(around=force_eager),
    "under a counter": Mode(around=partial(FlopCounterMode, display=False)),
    "aot_eager": Mode(options={"backend": "aot_eager"}),
    "forward": Mode(run=lambda model, *args: model.forward(*args)),
    "method": Mode(run=lambda model, *args: model.encode(*args), options={"methods": ["encode"]}),
    "method that calls the model": Mode(
        run=lambda model, *args: model.calls_itself(*args), options={"methods": ["calls_itself"]}
    ),
    "method and call by turns": Mode(run=by_turns, options={"methods": ["encode"]}),
    "method, uncompiled": Mode(run=lambda model, *args: model.encode(*args)),
    "part": Mode(run=lambda model, *args: model.net(*args)),
    "methods of a part": Mode(run=lambda model, x: model.net.forward_head(model.net.forward_features(x))),
    "part recomputed": Mode(run=lambda model, *args: non_reentrant(model.net, *args)),
    "part recomputed, reentrant": Mode(run=lambda model, *args: reentrant(model.net, *args)),
    "recomputed": Mode(non_reentrant),
    "recomputed, aot_eager": Mode(non_reentrant, options={"backend": "aot_eager"}),
    "recomputed, uncompiled": Mode(non_reentrant, around=force_eager),
    "reentrant": Mode(reentrant),
    "reentrant, uncompiled": Mode(reentrant, around=force_eager),
    "uncaptured": Mode(disabled),
    "compiled by the user": Mode(run=by_user),
    "in a compiled wrapper": Mode(run=lambda model, x: by_user(nn.Sequential(model), x)),
    "in a compiled function": Mode(run=lambda model, x: by_user(lambda x: model(x) + 0, x)),
    "copy": Mode(between=copied),
    "copy applied again": Mode(between=copied_and_applied),
    "resumed": Mode(between=resumed),
    "saved whole": Mode(between=pickled),
    "inference between": Mode(between=evaluated),
    "weights assigned": Mode(between=assigned),
    "weights assigned, uncompiled": Mode(around=force_eager, between=assigned),
    "applied again": Mode(before="tetrajet-qema"),
    "rehearsed": Mode(options={"example_inputs": vectors(0)}),
}

#: Modes in which the model itself is never called, so that no sites are listed.
OF_PARTS = (
    "forward", "method, uncompiled", "part", "part recomputed", "part recomputed, reentrant", "methods of a part"
)  # fmt: skip


def results(case: Case, policy: Any, mode: Mode) -> tuple[list[torch.Tensor], set[Any], int, int]:
    """Return all tensors (outputs, gradients, state, an evaluation), the quantized sites, and how many forwards and
    graphs there were."""
    torch.manual_seed(0)
    model = Whole(case.make(), mode.way)
    if mode.before:
        applied(model, mode.before)
    again(model, policy, **mode.options)
    optimizer, seen = prepared(model), []

    def run(*args):
        with mode.around():
            y = mode.run(model, *args)
        return getattr(y, "logits", y)

    for step in range(case.steps):
        if mode.between is not None and step == case.steps - 2:
            model, optimizer = mode.between(model, optimizer, policy, case)
        seen += train(model, optimizer, [case.batch(step)], run)
    model.eval()
    with torch.no_grad():
        seen.append(run(*case.batch(0)))
    runtime = runtime_of(model)
    # One graph may serve blocks at similar places.
    sites = {(pattern_of(site.module), site.op) for site in runtime.sites if site.quantized}
    return seen, sites, runtime.count, runtime.capture.graphs


@cache
def reference(name: str, policy: str, mode: str) -> Any:
    return results(CASES[name], POLICIES.get(policy, policy), MODES[mode])


def rows(cases, policies, modes, *, long=(), every=()):
    """Return a row for each case, policy and mode. Rows with a name in ``long`` or ``every`` are long; of those in
    ``every`` alone, continuous integration runs every row."""
    for names in itertools.product(cases, policies, sorted(modes)):
        marks = [pytest.mark.long] if {*names} & {*long} else [LONG] if {*names} & {*every} else []
        yield pytest.param(*names, marks=marks, id=", ".join(names))


def shipped():
    """Return rows for every shipped policy but those for experts, with as many blocks as it needs."""
    for policy in without_experts(sorted(default_registry().policies)):
        deep = "deep " if depth_of(policy) > 2 else ""
        often = {"long": [] if policy in FEW else [policy], "every": FEW - {"nvfp4-te", "tetrajet", "tetrajet-qema"}}
        yield from rows([f"{deep}vit"], [policy], ["uncompiled"], **often)
        if policy in FEW:
            yield from rows([f"{deep}llama"], [policy], ["uncompiled"], long=[policy])


EVERY = MODES.keys() - {"call", "methods of a part"}
#: Modes about the state of techniques; a policy without state is not tested in them.
OF_STATE = {name for name in EVERY if MODES[name].between} | {"rehearsed", "under a counter"}
BORROWING = ("beit", "eva02", "encoder and decoder", "swin v2", "torchvision's swin")
LOOPS = (
    "loop, reentrant blocks", "loop twice, recomputed experts", "loop twice, recomputed blocks",
    "loop, recomputed experts", "loop, recomputed blocks", "loop, reentrant experts",
)  # fmt: skip
RAMPS = ("tetrajet-qramping", "tetrajet-dampen")
OPTIMIZER_SIDE = ("q_ema", "q_ramping", "dampen", "freeze")
ROWS = [
    *shipped(),
    *rows(["calls"], ["tetrajet-qema"], EVERY),
    *rows(["calls"], ["tetrajet"], EVERY - OF_STATE, long=EVERY - {"applied again"}),
    *rows(["calls"], ["mxfp4-full-rht"], ["method"]),
    *rows(["vit"], ["tetrajet-qema"], ["methods of a part"]),
    *rows(["linear"], ["stochastic"], ["uncompiled", "forward", "copy"]),
    *rows(["one block under two names"], ["q_ema", "shared scales"], ["uncompiled"]),
    *rows(["disables", "logs"], ["tetrajet", "tetrajet-qema"], ["call"], long=["tetrajet"]),
    *rows(["borrows"], ["tetrajet", "tetrajet-qema"], ["call", "uncompiled"]),
    *rows(["borrows"], ["nearest"], ["weights assigned, uncompiled"]),
    *rows(["borrows"], RAMPS, ["call", "uncompiled"], every=RAMPS),
    *rows(BORROWING, ["tetrajet-qema", "tetrajet"], ["uncompiled"], long=[*BORROWING[1:], "tetrajet"], every=["beit"]),
    *rows(["broken"], ["nvfp4-te", "first block kept"], ["uncompiled"], long=["first block kept"]),
    *rows(["branches", "attends"], ["stochastic"], ["uncompiled"]),
    *rows(["attends, in evaluation"], ["stochastic"], ["uncompiled"], long=["stochastic"]),
    *rows(["owner"], ["nearest"], ["uncompiled"]),
    *rows(["grouped"], ["nvfp4-te", "tetrajet-qema", "mxfp4-best"], ["uncompiled"], every=["mxfp4-best"]),
    *rows(["grouped"], OPTIMIZER_SIDE, ["resumed"], long=OPTIMIZER_SIDE[1:], every=["q_ema"]),
    *rows(["gathered"], [*OPTIMIZER_SIDE, "hadamard"], ["call", "uncompiled"], long=[*OPTIMIZER_SIDE[1:], "hadamard"]),
    *rows(["gathered, checkpointed"], ["hadamard"], ["call"], long=["hadamard"]),
    *rows(["loop"], ["tetrajet", "tetrajet-qema"], ["uncompiled"], long=["tetrajet"]),
    *rows(["loop"], ["tetrajet", "tetrajet-qema"], ["resumed", "copy"], long=["resumed", "copy"]),
    *rows(LOOPS, ["tetrajet"], ["call"], long=[*LOOPS[1:]]),
]  # fmt: skip


@uncompiled
@pytest.mark.filterwarnings("ignore:.*smooth_swiglu.*no effect in this model:fp4graph.PolicyWarning")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint in an evaluation
@pytest.mark.parametrize(("case", "policy", "mode"), ROWS)
def test_a_mode_computes_what_the_call_computes(case, policy, mode):
    expected, sites, count, graphs = reference(CASES[case].reference or case, policy, CASES[case].mode)
    seen, found, counted, captured = results(CASES[case], POLICIES.get(policy, policy), MODES[mode])
    assert_equal(seen, expected)
    assert found == (set() if mode in OF_PARTS else sites)
    assert counted == count == (None if policy == "bf16" else CASES[case].steps)
    assert sites or policy == "bf16"
    if mode in ("method", "method that calls the model"):
        assert captured == graphs
