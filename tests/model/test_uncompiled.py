"""What runs outside the compiled graph computes what the graph computes."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest
import timm
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.model.runtime import runtime_of
from fp4graph.policy import shipped_policies
from fp4graph.technique.registry import default_registry
from tests.helpers.policies import depth_of, long_but_few, one_rule

pytestmark = pytest.mark.slow

uncompiled = pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")


def vit(seed=0, depth=2):
    torch.manual_seed(seed)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, depth=depth, embed_dim=64, num_heads=2, num_classes=10
    )


def llama(seed=0, depth=2):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": depth, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=97, max_position_embeddings=64, **sizes))


def images(seed=0):
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def tokens(seed=0):
    return torch.randint(0, 97, (2, 16), generator=torch.Generator().manual_seed(seed))


MODELS = {"vit": (vit, images, lambda y: y), "llama": (llama, tokens, lambda y: y.logits)}


def trained(model, inputs, output, steps=2, stance="default"):
    """Return outputs, gradients, weights and state of ``steps`` steps of ``model``."""
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    seen = []
    for step in range(steps):
        with torch.compiler.set_stance(stance):
            y = output(model(inputs(step)))
        y.square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [value.clone() for value in model.state_dict().values()]


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@uncompiled
@pytest.mark.filterwarnings("ignore:.*smooth_swiglu.*no effect in this model:fp4graph.PolicyWarning")
@pytest.mark.parametrize("kind", ["vit", pytest.param("llama", marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", long_but_few(sorted(shipped_policies(default_registry()))))
def test_uncompiled_training_is_that_of_the_graph(policy, kind):
    make, inputs, output = MODELS[kind]
    depth = depth_of(policy)
    results = []
    for stance in ("default", "force_eager"):
        model = fp4graph.apply(make(depth=depth), policy, backend="eager", seed=3, total_forwards=4)
        results.append(trained(model, inputs, output, stance=stance))
    assert_equal(*results)


def test_it_warns_once_and_says_why():
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    with torch.compiler.set_stance("force_eager"):
        with pytest.warns(PolicyWarning, match="force_eager"):
            model(images())
        model(images())


def test_the_recompile_limit_ends_no_training():
    def make():
        return nn.Sequential(nn.Linear(32, 32), nn.ReLU())

    model = fp4graph.apply(make(), "tetrajet", backend="eager", recompile_limit=2)
    ranks = [torch.randn(*([1] * rank), 2, 32) for rank in range(1, 4)]
    with pytest.warns(PolicyWarning, match="recompile limit"):
        limited = [model(x) for x in ranks]
    twin = make()
    twin.load_state_dict(fp4graph.strip(model.state_dict()))
    fp4graph.apply(twin, "tetrajet", backend="eager")
    with warnings.catch_warnings(action="error"):
        assert_equal(limited, [twin(x) for x in ranks])


@uncompiled
@pytest.mark.parametrize(
    "call",
    [
        lambda model, x: model.forward(x),
        lambda model, x: model.forward_head(model.forward_features(x)),
    ],
    ids=["forward", "methods"],
)
def test_methods_run_the_same(call):
    results = []
    for run in (lambda model, x: model(x), call):
        model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager", seed=1)
        optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
        results.append([])
        for step in range(3):
            y = run(model, images(step))
            y.square().mean().backward()
            results[-1] += [y.detach(), *(p.grad.clone() for p in model.parameters())]
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(*results)


@uncompiled
def test_a_part_called_by_itself_counts_as_one_forward_a_step():
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    root = runtime_of(model).root_state
    for _ in range(3):
        model.forward_features(images()).mean().backward()
    assert root.count == 2  # the third has begun and is not over
    model(images())
    assert root.count == 4
    with torch.no_grad():
        model.forward_features(images())
    assert root.count == 4


def test_strict_refuses():
    model = fp4graph.apply(vit(), "tetrajet", backend="eager", strict=True)
    with pytest.raises(fp4graph.UncompiledError, match=r"blocks\.0"):
        model.forward_features(images())
    with torch.compiler.set_stance("force_eager"), pytest.raises(fp4graph.UncompiledError, match="force_eager"):
        model(images())


@uncompiled
def test_checkpointed_parts_are_computed_again_with_their_noise():
    def gradients(run):
        model = fp4graph.apply(vit(), "tetrajet", backend="eager", seed=5)
        x = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0))
        first, second = (run(model.blocks[0], run(model.blocks[1], x * scale)) for scale in (1, 2))
        (first.square().mean() + second.square().mean()).backward()
        return [p.grad for block in model.blocks for p in block.parameters()]

    plain = gradients(lambda block, x: block(x))
    assert_equal(plain, gradients(lambda block, x: checkpoint(block, x, use_reentrant=False)))


@uncompiled
def test_what_dynamo_does_not_compile_runs():
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    with FlopCounterMode(display=False) as counter:
        y = model(images())
    assert counter.get_total_flops() > 0
    again = fp4graph.apply(vit(), "tetrajet", backend="eager")
    assert_equal([y], [again(images())])


class Attends(nn.Module):
    """Every way of writing attention and products."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.own_weight = nn.Parameter(torch.randn(32, 32) / 6)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + torch.einsum("bik,bkd->bid", torch.einsum("bid,bkd->bik", q, k).softmax(-1), v)
        x = x @ self.own_weight.t() + torch.baddbmm(x, q @ k.mT, v, alpha=0.1)
        return self.layer(x + self.attention(x, x, x, need_weights=False)[0])


@uncompiled
@pytest.mark.parametrize("training", [True, False])
def test_every_form_of_product_is_the_same(training):
    quantize = {"element": "e2m1", "block": 32, "rounding": "stochastic"}
    rules = [{"match": {"op": ["linear", "matmul", "sdpa"]}, "quantize": quantize}]
    policy = {"version": 1, "name": "all", "rules": rules}
    x = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
    results = []
    for stance in ("default", "force_eager"):
        torch.manual_seed(0)
        model = fp4graph.apply(Attends().train(training), policy, backend="eager")
        with torch.compiler.set_stance(stance):
            y = model(x)
        y.square().mean().backward()
        results.append([y.detach(), *(p.grad for p in model.parameters())])
        assert sum(site.quantized for site in runtime_of(model).sites) > 10
    assert_equal(*results)


class Gated(nn.Module):
    """A block whose last product has a SwiGLU before it."""

    def __init__(self):
        super().__init__()
        self.norm, self.gate, self.up, self.down = nn.LayerNorm(32), *(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def test_what_depends_on_an_unknown_producer_is_refused():
    policy = {
        "version": 1,
        "name": "by producer",
        "rules": [
            {"name": "down", "match": {"op": "linear", "producer": "swiglu"}, "keep": "exact"},
            {"name": "rest", "match": {"op": "linear"}, "quantize": {"element": "e2m1", "block": 32}},
        ],
    }
    model = fp4graph.apply(nn.Sequential(Gated(), Gated()), policy, backend="eager")
    x = torch.randn(2, 32)
    with pytest.raises(fp4graph.CaptureError, match="producer"), warnings.catch_warnings(action="ignore"):
        model[0].down(x)
    with warnings.catch_warnings(action="ignore"):
        alone = model[1](model[0](x))
    assert_equal([alone], [model(x)])


def test_a_module_that_came_later_is_refused():
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    model.blocks[0].mlp.fc1 = nn.Linear(64, 256)
    with pytest.raises(fp4graph.CaptureError, match="again"), warnings.catch_warnings(action="ignore"):
        model.blocks[0](torch.randn(1, 17, 64))


def test_bypass_and_remove_give_the_plain_model():
    plain, model = vit(), fp4graph.apply(vit(), "tetrajet", backend="eager")
    x = torch.randn(1, 17, 64)
    with fp4graph.bypass(model):
        assert_equal([plain.blocks[0](x)], [model.blocks[0](x)])
    fp4graph.remove(model)
    assert_equal([plain.blocks[0](x)], [model.blocks[0](x)])
    assert not any(module._compiled_call_impl for module in model.modules())
    copy.deepcopy(model)(images())


@pytest.mark.parametrize(
    "policy", ["tetrajet-qema", *(pytest.param(name, marks=pytest.mark.long) for name in ("tetrajet", "ue5m3-d50"))]
)
def test_a_copy_is_an_applied_model_with_its_own_state(policy):
    model = fp4graph.apply(vit(), policy, backend="eager", seed=2, total_forwards=8)
    first = trained(model, images, lambda y: y)
    twin = copy.deepcopy(model)
    assert runtime_of(twin) is not None
    assert runtime_of(twin).root_state.count == runtime_of(model).root_state.count == 2
    assert_equal(list(model.state_dict().values()), list(twin.state_dict().values()))
    assert_equal(trained(twin, images, lambda y: y), trained(model, images, lambda y: y))
    another = fp4graph.apply(vit(), policy, backend="eager", seed=2, total_forwards=8)
    assert_equal(first, trained(another, images, lambda y: y))
    assert copy.deepcopy(twin.blocks[0]) is not None


def test_an_average_of_weights_evaluates_quantized():
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    model(images()).mean().backward()
    averages = [
        timm.utils.ModelEmaV3(model, decay=0.5),
        torch.optim.swa_utils.AveragedModel(model, use_buffers=True),
        torch.optim.swa_utils.AveragedModel(model),
    ]
    for average in averages:
        (average.update if hasattr(average, "update") else average.update_parameters)(model)
        with torch.no_grad():
            assert_equal([average.module.eval()(images())], [average.eval()(images())])
            assert_equal([model.eval()(images())], [average(images())])


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.swa_utils.AveragedModel(
            model, avg_fn=lambda average, value, _: 0.5 * average + 0.5 * value, use_buffers=True
        ),
        lambda model: timm.utils.ModelEmaV3(model, decay=0.5),
    ],
    ids=["all buffers", "state dict"],
)
def test_an_average_draws_the_noise_of_its_model(make):
    """With weights that stay, an average is its model: averaged buffers, noise in evaluation and all."""
    model = fp4graph.apply(vit(), "mxfp4-rl", backend="eager")
    average = make(model)
    for _ in range(3):
        model(images())
        (average.update if hasattr(average, "update") else average.update_parameters)(model)
    with torch.no_grad():
        assert_equal([model.eval()(images())], [average.eval()(images())])
        assert not torch.equal(model(images()), vit().eval()(images()))


def test_a_copy_follows_the_phases_of_its_model_until_it_trains():
    policy = one_rule(phases=[{"at": 2, "rules": [], "default": "keep"}])
    model = fp4graph.apply(vit(), policy, backend="eager")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        quantized = twin(images())
    for _ in range(3):
        model(images())
    with torch.no_grad():
        assert_equal([vit()(images())], [twin(images())])
        assert not torch.equal(quantized, twin(images()))
    other = copy.deepcopy(twin)
    twin(images())
    model(images())
    assert (runtime_of(model).count, runtime_of(twin).count) == (4, 1)
    with torch.no_grad():
        late = copy.deepcopy(model)
        late(images())
        del model, other
        assert_equal([vit()(images())], [late(images())])
    assert runtime_of(pickle.loads(pickle.dumps(copy.deepcopy(twin)))) is None


def test_a_copy_knows_a_length_that_its_model_is_told_later():
    phased = one_rule(phases=[{"at": 0.5, "rules": [], "default": "keep"}])
    model = fp4graph.apply(vit(), phased, backend="eager")
    twin = copy.deepcopy(model)
    fp4graph.set_total_forwards(model, 4)
    for _ in range(2):
        model(images())
    with torch.no_grad():
        assert_equal([vit()(images())], [twin(images())])


@uncompiled
def test_training_by_parts_warns_of_a_rule_that_it_does_not_meet():
    policy, x = one_rule(match={"module": "blocks.1.*"}), torch.randn(2, 16, 64)
    other = {"name": "other", "match": {"module": "blocks.0.*"}, "quantize": policy["rules"][0]["quantize"]}
    met = fp4graph.apply(vit(), policy, backend="eager")
    for _ in range(3):
        met.blocks[1](x)
    unmet = fp4graph.apply(vit(), {**policy, "rules": [*policy["rules"], other]}, backend="eager")
    unmet.blocks[1](x)
    with pytest.warns(PolicyWarning, match="have trained for a step by themselves, but .*rule 'other' matches no site"):
        unmet.blocks[1](x)
    unmet.blocks[1](x)


class OwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class NewOwnProduct(torch.autograd.Function):
    @staticmethod
    def forward(x, w):
        return x @ w.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = OwnProduct.backward


class OwnLinear(nn.Linear):
    def __init__(self, function):
        super().__init__(32, 32, bias=False)
        self.function = function

    def forward(self, x):
        return self.function.apply(x, self.weight)


@uncompiled
@pytest.mark.parametrize("function", [OwnProduct, NewOwnProduct])
@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_a_function_with_a_backward_of_its_own_is_refused_until_a_rule_keeps_it(stance, function):
    model, x = nn.Sequential(nn.Linear(32, 32), OwnLinear(function)), torch.randn(4, 32)
    policy = one_rule()
    with torch.compiler.set_stance(stance):
        with pytest.raises(fp4graph.CaptureError, match=r"multiplies with a parameter.*To keep it, put a rule"):
            fp4graph.apply(model, policy, backend="eager")(x)
        kept = {"name": "kept", "match": {"module": "1"}, "keep": "has a backward of its own"}
        y = fp4graph.apply(model, {**policy, "rules": [kept, *policy["rules"]]}, backend="eager")(x)
    weight = fp4graph.remove(model)[1].weight
    assert_equal([y], [fp4graph.apply(nn.Sequential(model[0]), policy, backend="eager")(x) @ weight.t()])


class Wrapper(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.out = net, nn.Linear(10, 3)

    def forward(self, x):
        return self.out(self.net(x))


@pytest.mark.parametrize(
    "outside",
    [
        "wrapper",
        pytest.param("function", marks=pytest.mark.long),
        pytest.param("model", marks=pytest.mark.long),
        pytest.param("average", marks=pytest.mark.long),
    ],
)
def test_an_outer_compilation_runs_the_applied_model(outside):
    model, x = fp4graph.apply(vit(), "tetrajet", backend="eager"), images()
    expected = fp4graph.apply(vit(), "tetrajet", backend="eager")(x)
    if outside == "wrapper":
        wrapper = Wrapper(model)
        y = torch.compile(wrapper, backend="aot_eager")(x)
        expected = wrapper.out(expected)
    elif outside == "function":
        y = torch.compile(lambda x: 2 * model(x), backend="aot_eager")(x) / 2
    elif outside == "model":
        y = torch.compile(model, backend="aot_eager")(x)
    else:
        y = torch.compile(timm.utils.ModelEmaV3(model), backend="aot_eager")(x)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.sum().backward()
    if outside != "average":
        assert model.blocks[0].attn.qkv.weight.grad is not None


@pytest.mark.parametrize("first", ["apply", "compile"])
def test_what_torch_compile_returned_is_the_model_inside(first):
    policy = {
        "version": 1,
        "name": "by name",
        "rules": [{"name": "first", "match": {"module": "blocks.0.*"}, "quantize": {"element": "e2m1", "block": 32}}],
    }
    expected = fp4graph.apply(vit(), policy, backend="eager")(images())
    model = fp4graph.apply(vit(), policy, backend="eager") if first == "apply" else vit()
    compiled = torch.compile(model, backend="aot_eager")
    if first == "compile":
        assert not torch.equal(compiled(images()), expected)
        assert fp4graph.apply(compiled, policy, backend="eager") is compiled
    optimizer = fp4graph.prepare_optimizer(compiled, torch.optim.SGD(compiled.parameters(), lr=0.1))
    assert_equal([compiled(images())], [expected])
    compiled(images()).sum().backward()
    optimizer.step()
    assert runtime_of(compiled).count == 2
    assert model.state_dict().keys() == vit().state_dict().keys()
    fp4graph.remove(compiled)
    assert runtime_of(model) is None


@uncompiled
def test_a_root_that_owns_its_weight():
    torch.manual_seed(0)
    model = fp4graph.apply(nn.Linear(32, 32), "tetrajet", backend="eager")
    twin = fp4graph.apply(copy.deepcopy(fp4graph.remove(copy.deepcopy(model))), "tetrajet", backend="eager")
    x = torch.randn(8, 32)
    for _ in range(2):
        assert_equal([model(x)], [twin.forward(x)])
    assert [type(hook).__name__ for hook in twin._forward_pre_hooks.values()] == ["MarkHook"]


@uncompiled
def test_weights_that_load_state_dict_assigned():
    models = [fp4graph.apply(vit(), "tetrajet-qema", backend="eager") for _ in range(2)]
    for model in models:
        model.load_state_dict(vit(seed=1).state_dict(), assign=True)
    with torch.compiler.set_stance("force_eager"):
        y = models[0](images())
    assert_equal([y], [models[1](images())])


class Checkpointed(nn.Module):
    def __init__(self, checkpoints) -> None:
        super().__init__()
        self.first, self.second, self.checkpoints = nn.Linear(32, 64), nn.Linear(64, 32), checkpoints

    def both(self, x):
        return self.second(torch.relu(self.first(x)))

    def forward(self, x):
        return x + self.checkpoints(self.both, x)


@uncompiled
@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_no_forward_of_its_own(reentrant):
    """The second step has the noise of a second forward, as without a checkpoint."""
    policy = one_rule(quantize={"block": 16}, operands={"gradients": {"rounding": "stochastic"}})

    def of_three_steps(checkpoints):
        torch.manual_seed(0)
        model = fp4graph.apply(Checkpointed(checkpoints), policy, backend="eager", seed=1)
        gradients = []
        with torch.compiler.set_stance("force_eager"):
            for _ in range(3):
                x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
                model(x).square().mean().backward()
                gradients += [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
        assert runtime_of(model).count == 3
        return gradients

    def again(call, x):
        return checkpoint(call, x, use_reentrant=reentrant)

    assert_equal(of_three_steps(again), of_three_steps(lambda call, x: call(x)))


@uncompiled
def test_a_checkpoint_between_steps_of_parts_has_begun_forwards():
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    for _ in range(3):
        model.forward_features(images()).mean().backward()
    assert runtime_of(model).count == 3
    assert runtime_of(copy.deepcopy(model)).count == 3


@uncompiled
def test_reentrant_checkpointing_of_parts_counts():
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    x = torch.randn(2, 17, 64, requires_grad=True)
    for _ in range(3):
        checkpoint(model.blocks[0], x, use_reentrant=True).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert runtime_of(model).count == 3
    qkv = model.blocks[0].attn.qkv
    assert not torch.equal(qkv._fp4graph_q_ema_weight, qkv.weight)


class InAnotherThread(nn.Module):
    """Runs ``call`` in a thread of its own, in the middle of a forward, and keeps the error."""

    def __init__(self, call) -> None:
        super().__init__()
        self.call, self.errors = call, []

    @torch.compiler.disable
    def forward(self, x):
        thread = threading.Thread(target=self._run)
        thread.start()
        thread.join()
        return x

    def _run(self):
        try:
            self.call()
        except fp4graph.Error as error:
            self.errors.append(str(error))


@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_two_threads_are_refused(stance):
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    calls = {"default": lambda: model(images()), "force_eager": lambda: model.blocks[1](torch.randn(2, 16, 64))}
    model.blocks[0].drop_path1 = other = InAnotherThread(calls[stance])
    with torch.compiler.set_stance(stance), warnings.catch_warnings(action="ignore"):
        model(images())
    assert len(other.errors) == 1
    assert "threads" in other.errors[0]
