"""Modules that the compiled call runs outside of its graphs: loops over the values of tensors, disabled functions."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.graph.functions import site_function
from fp4graph.model.runtime import runtime_of
from tests.helpers.policies import NVFP4, one_rule
from tests.model.test_uncompiled import assert_equal

pytestmark = pytest.mark.slow

EXPERTS, WIDTH, HIDDEN = 4, 32, 48
OPS = ["linear", "grouped"]
uncaptured = pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")


class Experts(nn.Module):
    """The loop of transformers' ``eager`` experts, over those with tokens: ``w1 [E, N, K]`` and ``w2 [E, K, N]``."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 6)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 7)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))

    def forward(self, x, choice):
        y = torch.zeros_like(x)
        for expert in torch.bincount(choice, minlength=EXPERTS).nonzero():
            tokens = torch.where(choice == expert[0])[0]
            hidden = F.silu(F.linear(x[tokens], self.w1[expert[0]]))
            y.index_add_(0, tokens, hidden @ self.w2[expert[0]] + self.bias[expert[0]])
        return y


class Unrolled(Experts):
    """The same with a fixed number of experts, which Dynamo captures. The third has no token (:func:`batch`)."""

    def forward(self, x, choice):
        y = torch.zeros_like(x)
        for expert in (0, 1, 3):
            mine = (choice == expert)[:, None]
            hidden = F.silu(F.linear(x, self.w1[expert]))
            y = y + (hidden @ self.w2[expert] + self.bias[expert]) * mine
        return y


class Block(nn.Module):
    def __init__(self, experts=Experts) -> None:
        super().__init__()
        self.proj, self.experts, self.out = nn.Linear(WIDTH, WIDTH), experts(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, choice):
        return x + self.out(self.experts(self.proj(x), choice))


class Model(nn.Module):
    """``region`` is what is checkpointed: nothing, the "experts" or each "block". ``again`` calls the blocks twice."""

    def __init__(self, experts=Experts, region=None, *, again=False, reentrant=False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(experts) for _ in range(2))
        self.region, self.again, self.reentrant = region, again, reentrant

    def forward(self, x, choice):
        for block in [*self.blocks, *self.blocks] if self.again else self.blocks:
            if self.region == "block":
                x = checkpoint(block, x, choice, use_reentrant=self.reentrant)
            elif self.region == "experts":
                inner = block.proj(x)
                x = x + block.out(checkpoint(block.experts, inner, choice, use_reentrant=self.reentrant))
            else:
                x = block(x, choice)
        return x


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    choice = torch.tensor([0, 1, 3])[torch.randint(0, 3, (70,), generator=generator)]
    return torch.randn(70, WIDTH, generator=generator), choice


def applied(model, policy="tetrajet", **options):
    model = fp4graph.apply(model, policy, **{"backend": "eager", "seed": 1, **options})
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, fp4graph.prepare_optimizer(model, adam)


def train(model, optimizer, steps=(0, 1)):
    """Return outputs and gradients of each step, and weights and state at the end."""
    seen = []
    for step in steps:
        x, choice = batch(step)
        y = model(x.requires_grad_(), choice)
        y.square().mean().backward()
        seen += [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [value.clone() for value in model.state_dict().values()]


def sites_of(model):
    return [(site.module, site.op, site.occurrence, site.quantized) for site in runtime_of(model).sites]


@uncaptured
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[pytest.mark.long, pytest.mark.inductor])])
def test_a_loop_over_experts_is_that_of_ordinary_linears(backend):
    """The model is computed by hand, expert by expert, with the program of a linear layer."""
    policy = one_rule("tensor_scaling", op=OPS, quantize=NVFP4)
    model, _ = applied(Model(), policy, backend=backend)
    plain = Model()
    x, choice = batch()
    linear = site_function(runtime_of(model).weights[0].plan.program, "linear", 1.0, 1.0)
    first = x = x.requires_grad_()
    for block in plain.blocks:
        inner = linear(x, block.proj.weight, block.proj.bias, None, None, 0)
        y = torch.zeros_like(x)
        for expert in (0, 1, 3):
            tokens = torch.where(choice == expert)[0]
            hidden = F.silu(linear(inner[tokens], block.experts.w1[expert], None, None, None, 0))
            own = linear(hidden, block.experts.w2[expert].T, None, None, None, 0) + block.experts.bias[expert]
            y.index_add_(0, tokens, own)
        x = x + linear(y, block.out.weight, block.out.bias, None, None, 0)
    given = batch()[0].requires_grad_()
    ours = model(given, choice)
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    ours.backward(dy)
    x.backward(dy)
    found = [ours.detach(), given.grad, *(p.grad for p in model.parameters())]
    expected = [x.detach(), first.grad, *(p.grad for p in plain.parameters())]
    if backend == "eager":
        assert_equal(found, expected)
    else:  # the compiled blocks around the loop sum in another order
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.equal(ours, Model()(*batch()))
    assert not model.blocks[0].experts.w1.grad[2].any()


@uncaptured
def test_each_product_is_a_site_of_the_first_forward():
    model, _ = applied(Model(), one_rule("tensor_scaling", op=OPS, quantize=NVFP4, expect={"quantized": 16}))
    model(*batch())
    counts = torch.bincount(batch()[1], minlength=EXPERTS)
    experts = [site for site in runtime_of(model).sites if site.module == "blocks.1.experts"]
    assert [(site.op, site.occurrence, site.quantized) for site in experts] == [("linear", i, True) for i in range(6)]
    assert [site.flops for site in experts] == [
        2 * int(counts[e]) * WIDTH * HIDDEN for e in (0, 1, 3) for _ in range(2)
    ]
    model(*batch(1))
    assert len(runtime_of(model).sites) == 16
    quantized = {weight.name for weight in runtime_of(model).weights if weight.is_captured}
    assert {f"blocks.{i}.experts.w{j}" for i in (0, 1) for j in (1, 2)} <= quantized


def test_it_warns_once_and_names_the_module_and_the_remedy():
    model, optimizer = applied(Model())
    with pytest.warns(PolicyWarning, match=r"blocks\.0\.experts.*uncompiled.*loop.*grouped_mm") as seen:
        train(model, optimizer)
    assert len(seen) == 1


def test_strict_refuses():
    model, _ = applied(Model(), strict=True)
    for _ in range(2):
        with pytest.raises(fp4graph.CaptureError, match=r"blocks\.0\.experts: .*not captured.*grouped_mm"):
            model(*batch())


@uncaptured
def test_the_rest_stays_compiled():
    graphs = []
    model, _ = applied(Model())
    runtime = runtime_of(model)
    inner = runtime.capture._inner
    runtime.capture._inner = lambda gm, inputs: graphs.append(gm) or inner(gm, inputs)
    for step in range(3):
        model(*batch(step))
    compiled = [node.kwargs["site"] for gm in graphs for node in gm.graph.nodes if "site" in node.kwargs]
    assert sorted(compiled) == [f"blocks.{i}.{name}" for i in (0, 1) for name in ("out", "proj")]


@uncaptured
@pytest.mark.parametrize("policy", ["tetrajet-qema", pytest.param("tetrajet", marks=pytest.mark.long)])
def test_training_resumes_bit_for_bit_with_stochastic_rounding(policy):
    model, optimizer = applied(Model(), policy)
    train(model, optimizer, range(3))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    resumed, second = applied(Model(), policy)
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    ours = train(resumed, second, range(3, 5))
    assert_equal(ours, train(model, optimizer, range(3, 5)))
    other, third = applied(Model(), policy, seed=2)
    other.load_state_dict(saved[0])
    assert not torch.equal(train(other, third, [3])[1], ours[1])


@uncaptured
@pytest.mark.parametrize(
    ("region", "again", "reentrant"),
    [
        ("experts", True, False),
        ("block", True, False),
        ("block", False, True),
        pytest.param("experts", False, True, marks=pytest.mark.long),
        pytest.param("experts", False, False, marks=pytest.mark.long),
        pytest.param("block", False, False, marks=pytest.mark.long),
    ],  # a reentrant checkpoint's backward cannot tell two calls of a module apart, which share their noise
)
def test_what_a_checkpoint_recomputes_repeats_its_noise(region, again, reentrant):
    """The count and the gradients are those of the same training without the checkpoint."""
    plain, optimizer = applied(Model(again=again))
    # A graph that runs twice in a forward draws under a step of its own (docs/techniques.md); a checkpoint does not.
    with torch.compiler.set_stance("force_eager" if again and region == "block" else "default"):
        expected = train(plain, optimizer, range(3))
    model, second = applied(Model(region=region, again=again, reentrant=reentrant))
    assert_equal(train(model, second, range(3)), expected)
    assert runtime_of(model).count == 3


@uncaptured
def test_calls_of_one_module_draw_apart():
    policy = one_rule(op=OPS, quantize=NVFP4 | {"rounding": "stochastic"})

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.experts = Experts()

        def forward(self, x, choice):
            return self.experts(x, choice), self.experts(x, choice)

    model, _ = applied(Twice(), policy)
    one, other = model(*batch())
    assert not torch.equal(one, other)
    assert [site[2] for site in sites_of(model)] == list(range(12))
    again, _ = applied(Twice(), policy)
    assert_equal(list(again(*batch())), [one, other])


@uncaptured
def test_an_evaluation_is_that_of_a_captured_model():
    model, optimizer = applied(Model())
    train(model, optimizer)
    unrolled, _ = applied(Model(Unrolled))
    unrolled.load_state_dict(model.state_dict())
    with torch.no_grad():
        ours, theirs = (each.eval()(*batch()) for each in (model, unrolled))
        # The same products of each row; the rows of an expert are summed in blocks of another shape.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(ours, Model()(*batch()), rtol=1e-2, atol=1e-2)
    assert runtime_of(model).count == 2


class Disabled(nn.Module):
    """An ordinary layer that is called in a function that Dynamo must not touch."""

    def __init__(self, *, disabled=True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.disabled = disabled

    @torch.compiler.disable
    def outside(self, x):
        return self.first(x).relu()

    def forward(self, x, choice):
        inner = self.outside(x) if self.disabled else self.first(x).relu()
        return self.second(inner)


class Logged(nn.Linear):
    """A layer that a graph break parts from its own forward's end."""

    def forward(self, x):
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y


class Logs(Disabled):
    def __init__(self) -> None:
        super().__init__(disabled=False)
        first = Logged(WIDTH, WIDTH)
        first.load_state_dict(self.first.state_dict())
        self.first = first


@pytest.mark.parametrize(
    ("make", "policy"),
    [(Disabled, "tetrajet"), (Logs, "tetrajet-qema"), pytest.param(Logs, "tetrajet", marks=pytest.mark.long)],
)
def test_a_layer_in_a_disabled_function_or_with_a_break_trains_as_in_a_graph(make, policy):
    expected = train(*applied(Disabled(disabled=False), policy))
    model, optimizer = applied(make(), policy)
    why = "disabled function" if make is Disabled else "graph break"
    with pytest.warns(PolicyWarning, match=f"module 'first' runs uncompiled.*{why}") as seen:
        assert_equal(train(model, optimizer), expected)
    assert len(seen) == 1
    assert {site[0] for site in sites_of(model)} == {"first", "second"}
    refused, _ = applied(make(), policy, strict=True)
    with pytest.raises(fp4graph.Error, match="first"):
        refused(*batch())


def test_state_of_a_whole_stack_is_refused():
    scaling = {"tensor_scaling": {"hold_steps": 4, "granularity": "all"}}
    model, _ = applied(Model(), one_rule(scaling, op=OPS, quantize=NVFP4))
    for _ in range(2):
        refused = pytest.raises(fp4graph.CaptureError, match=r"experts: .*tensor_scaling keeps one state.*grouped_mm")
        with refused, warnings.catch_warnings(action="ignore"):
            model(*batch())


@uncaptured
def test_the_optimizer_sees_each_expert_by_itself():
    """One tensor scale for each matrix, as the products of the loop have it."""
    policy = one_rule("tensor_scaling", "q_ema", op=OPS, quantize=NVFP4)
    model, _ = applied(Model(), policy)
    with torch.no_grad():
        model.blocks[0].experts.w1[1] *= 64  # one scale for all would tell
    model(*batch())
    weight = next(w for w in runtime_of(model).weights if w.name == "blocks.0.experts.w1")
    stored = weight.parameter.detach()
    program = weight.plan.program.fprop.right
    expected = [program(own, None, {"q_ema": {"weight": own.float()}})[0].product() for own in stored]
    assert_equal([weight.quantize(stored, runtime_of(model).step)], [torch.stack(expected)])


def assert_as_uncompiled(make, policy, inputs, steps=3):
    """Hold outputs and gradients of a model to those of its forwards without a compiler, bit for bit."""

    def seen(stance):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = fp4graph.apply(make(), policy, backend="eager", seed=1)
        results = []
        with torch.compiler.set_stance(stance):
            for step in range(steps):
                y = model(*inputs(step))
                y.square().mean().backward()
                results += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
                model.zero_grad()
        return results

    compiled = seen("default")
    assert_equal(compiled, seen("force_eager"))
    return compiled


def tokens(step):
    return (torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(step)),)


STOCHASTIC = one_rule(quantize={"block": 16, "rounding": "stochastic"}, match={"op": OPS})


class Branches(nn.Module):
    """A branch without gradients between two calls of one layer, all where Dynamo is disabled."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    @torch.compiler.disable
    def off(self, layer, x):
        return layer(x)

    def forward(self, x):
        first = self.off(self.online, x)
        with torch.no_grad():
            self.off(self.target, x)
        return self.last(first - self.off(self.online, x))


@uncaptured
def test_a_branch_without_gradients_lets_no_noise_repeat():
    first = assert_as_uncompiled(Branches, STOCHASTIC, tokens)[0]
    assert not torch.equal(first, first[:1].expand_as(first))  # the bias of the last layer, if the calls drew the same


class Owner(nn.Module):
    """Multiplies with a matrix of its own; forwards of many tokens loop in a way that Dynamo skips."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) / 6)

    def forward(self, x):
        if x.shape[0] <= 40:
            return F.linear(x, self.w)
        for _ in range(2):
            x = F.linear(x, self.w)
            torch._dynamo.graph_break()
        return x


@uncaptured
def test_a_loop_that_begins_after_the_first_forward_is_quantized():
    policy = one_rule(quantize={"block": 16, "rounding": "nearest"}, match={"op": OPS})
    many = torch.randn(50, WIDTH, generator=torch.Generator().manual_seed(9))
    assert_as_uncompiled(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Owner()), policy, lambda step: (many if step else many[:40],)
    )


class Broken(nn.Module):
    """A block whose inner module breaks the graph between two layers."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.first(x)
            torch._dynamo.graph_break()
            return self.second(torch.relu(y))

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = self.Inner(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.out(self.inner(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Broken() for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@uncaptured
@pytest.mark.parametrize("policy", ["nvfp4-te", "first block alone"])
def test_graphs_of_kept_layers_do_not_run_for_others(policy):
    """Behind a break one graph could serve all blocks: Dynamo does not look at hooks unless it is told to."""
    if policy == "first block alone":
        keep = {"name": "first", "match": {"op": OPS, "first_blocks": 1}, "keep": "sensitive"}
        policy = {**STOCHASTIC, "rules": [keep, *STOCHASTIC["rules"]]}
    assert_as_uncompiled(Stack, policy, tokens, steps=2)


@uncaptured
def test_policies_of_first_and_last_blocks_train_loops_over_experts():
    model = Model()
    model.blocks = nn.ModuleList(Block() for _ in range(4))
    model, optimizer = applied(model, "nvfp4-te")
    train(model, optimizer)
    sites = {site.module: site.quantized for site in runtime_of(model).capture.sites}
    assert sites["blocks.1.experts"]
    assert not sites.get("blocks.0.experts")


@uncaptured
def test_detect_nonfinite_names_the_module():
    model, optimizer = applied(Model())
    train(model, optimizer)
    refused = pytest.raises(fp4graph.Error, match=r"'blocks.0.experts' is not compiled.*grouped_mm")
    with refused, fp4graph.detect_nonfinite(model):
        model(*batch())
