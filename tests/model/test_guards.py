"""Nothing runs in high precision in silence, and every bad input raises one clear error."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from unittest import mock

import pytest
import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional as F

import fp4graph
from fp4graph.errors import CaptureError, PolicyError, UncompiledError
from fp4graph.model import prepare
from fp4graph.model.runtime import runtime_of
from tests.helpers.breaks import Disables, Logs, Looping
from tests.helpers.experts import Mixture, tokens
from tests.helpers.models import Mlp, module_of
from tests.helpers.policies import MXFP4, NVFP4, one_rule, quantizer
from tests.helpers.processes import python, run
from tests.helpers.training import applied, assert_equal, stances, uncompiled

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def rule(name="the rule", **match):
    return {"name": name, "match": match, "quantize": MXFP4}


def policy(*rules, **more):
    return {"version": 1, "name": "p", "rules": list(rules), **more}


class Net(nn.Module):
    def __init__(self, head=nn.Linear):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Mlp(32, 48, 32), Mlp(32, 48, 32)), head(32, 8, bias=False)

    def encode(self, x):
        return self.blocks(x)

    def forward(self, x):
        return self.head(self.blocks(x))


loops = partial(Mixture, "loop")


def looping():
    return nn.Sequential(nn.Linear(32, 32), Looping())


def force_eager(model):
    with torch.compiler.set_stance("force_eager"):
        model(X)


def ever_more_dimensions(model):
    for rank in range(8):
        model(torch.randn(*([1] * rank), 2, 32))


call, part = lambda m: m(X), lambda m: m.blocks[0]
ANOTHER = r"another torch\.compile backend"
STRICT = {
    "forward": (Net, lambda m: m.forward(X), UncompiledError, r"blocks\.0\.first"),
    "a method": (Net, lambda m: m.encode(X), UncompiledError, r"blocks\.0\.first"),
    "a part": (Net, lambda m: part(m)(X), UncompiledError, r"blocks\.0\.first.*apply"),
    "forward of a bare layer": (partial(nn.Linear, 32, 32), lambda m: m.forward(X), UncompiledError, "apply"),
    "force_eager": (Net, force_eager, UncompiledError, "force_eager"),
    "the recompile limit": (Net, ever_more_dimensions, UncompiledError, "recompile limit"),
    "eager": (Net, lambda m: torch.compile(part(m), backend="eager")(X), Exception, ANOTHER),
    "aot_eager": (Net, lambda m: torch.compile(part(m), backend="aot_eager")(X), Exception, ANOTHER),
    "a disabled function": (partial(Disables, 32, 48, 32), call, fp4graph.Error, "first"),
    "a graph break": (partial(Logs, 32, 48, 32), call, fp4graph.Error, "first"),
    "a loop": (loops, lambda m: m(*tokens()), CaptureError, r"^layers\.0\.experts: .*not captured.*grouped_mm"),
    "what no graph shows": (looping, call, CaptureError, r"^1: the module was called.*not captured"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRICT)
def test_strict_refuses_what_runs_uncompiled(name):
    make, call, error, text = STRICT[name]
    policy = "microscaling" if make is looping else "tetrajet"
    model = applied(make(), policy, strict=True, recompile_limit=2)
    for _ in range(2):
        with pytest.raises(error, match=text):
            call(model)


def experts():
    """Multiply each quarter of the tokens with its matrix, in a form of torch's grouped product that is not a site."""

    def forward(self, x):
        return torch._grouped_mm(x.bfloat16().unflatten(0, (4, -1)), self.weight_stack.bfloat16()).flatten(0, 1).float()

    return module_of(forward, weight_stack=nn.Parameter(torch.randn(4, 32, 32)))


@torch.library.custom_op("fp4graph_tests::fused_projection", mutates_args=())
def fused_projection(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w.t()


@fused_projection.register_fake
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[0])


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w, g.t() @ x


class NewProduct(torch.autograd.Function):
    """The same in torch's newer style."""

    @staticmethod
    def forward(x, w):
        return x @ w.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    backward = Product.backward


class Multiplies(nn.Linear):
    def __init__(self, product):
        super().__init__(32, 32, bias=False)
        self.product = product

    def forward(self, x):
        return self.product(x, self.weight)


UNKNOWN = {
    "custom operator": partial(Multiplies, fused_projection),
    "mv": partial(Multiplies, lambda x, w: torch.stack([w.mv(row) for row in x])),
    "autograd function": partial(Multiplies, Product.apply),
    "newer autograd function": partial(Multiplies, NewProduct.apply),
    "grouped product": experts,
}
KEPT = {"name": "kept", "match": {"module": "1"}, "keep": "not yet"}


@pytest.mark.slow
@uncompiled
@stances
@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_product_with_a_parameter_is_an_error_until_a_rule_keeps_it(stance, name):
    model = nn.Sequential(nn.Linear(32, 32), UNKNOWN[name]())
    with torch.compiler.set_stance(stance):
        applied(model, one_rule())
        for _ in range(2):
            with pytest.raises(CaptureError, match=r"^1: \w+ .*multiplies.* keep it.*rule before .*module: '1'}, keep"):
                model(X)
        y = applied(model, policy(KEPT, *one_rule()["rules"]))(X)
    layer = fp4graph.remove(model)[1]
    assert_equal([y], [layer(applied(nn.Sequential(copy.deepcopy(model[0])), one_rule())(X))])
    assert_equal([applied(model, "bf16")(X)], [fp4graph.remove(model)(X)])  # not refused where nothing is quantized


@pytest.mark.slow
def test_explain_lists_an_unknown_product():
    model = nn.Sequential(nn.Linear(32, 32), experts(), nn.Linear(32, 8))
    refused, kept = (fp4graph.explain(model, each, (X,)) for each in (one_rule(), policy(KEPT, *one_rule()["rules"])))
    assert "_grouped_mm multiplies" in refused.problem
    assert [(site.module, site.op, site.quantized) for site in refused.sites] == [
        ("0", "linear", True), ("1", "_grouped_mm", False), ("2", "linear", True)
    ]  # fmt: skip
    assert kept.problem is None
    assert (kept.sites[1].rule, kept.sites[1].reason) == ("kept", "not yet")


@pytest.mark.slow
def test_a_kept_product_outside_of_the_graphs_runs_under_strict():
    applied(looping(), policy(KEPT | {"required": False}, rule(op="linear")), strict=True)(X)


@pytest.mark.slow
def test_an_unknown_product_is_no_error_where_no_linear_layer_would_be_quantized():
    head = partial(Multiplies, torch.inner)
    explanation = fp4graph.explain(Net(lambda *sizes, bias: head()), "tetrajet", (X,))
    assert explanation.problem is None
    assert [site.op for site in explanation.sites if site.module == "head"] == ["inner"]


def recurrent(wrap=lambda rnn: rnn):
    rnn = wrap(nn.LSTM(32, 64, batch_first=True))
    return module_of(lambda self, x: self.head(self.rnn(x)[0][:, -1]), rnn=rnn, head=nn.Linear(64, 10))


weight_norm = torch.nn.utils.parametrizations.weight_norm
WIDE = rule("wide", in_features=12345)
resnet = partial(timm.create_model, "resnet10t", num_classes=10)
GELU = policy({**rule("after gelu", producer="gelu"), "techniques": ["dampen"]}, rule("rest", op="linear"))
STACK = one_rule({"tensor_scaling": {"hold_steps": 4, "granularity": "all"}}, op=["linear", "grouped"], quantize=NVFP4)
SEQUENCE, IMAGE = (torch.randn(2, 5, 32),), (torch.randn(2, 3, 32, 32),)
#: The model, the policy, the arguments and the error.
REFUSED = {
    "a rule without a site": (Net, policy(WIDE, rule(op="linear")), (X,), "'wide' matches no site"),
    "a rule for experts": (Net, one_rule(op="grouped"), (X,), "rule 'all' matches no site"),
    "nothing quantized": (Net, policy(WIDE | {"required": False}), (X,), "quantizes no site"),
    "expectations": (Net, policy(rule(op="linear"), expect={"quantized": {"min": 100}}), (X,), "100"),
    "no products": (lambda: nn.Sequential(nn.ReLU(), nn.LayerNorm(32)), "tetrajet", (X,), "no site"),
    # A whole model may be the one block; the head that timm's models name is not part of it.
    "a head alone": (resnet, "tetrajet", IMAGE, "stack of blocks.*: nothing would be.*match:"),
    "a head behind an LSTM": (recurrent, "tetrajet", SEQUENCE, "stack of blocks.*: only head would be.*match:"),
    "two rules for a weight": (
        lambda: module_of(lambda self, x: self.fc(F.gelu(self.fc(x))), fc=nn.Linear(32, 32)), GELU, (X,),
        r"^fc\.weight: two products.*'rest'.*'after gelu'",
    ),
    "a technique that would mix experts": (
        partial(Mixture, "grouped"), one_rule("low_rank_residual", op=["linear", "grouped"]), tokens(),
        r"layers\.0\.experts.*technique low_rank_residual does not tell",
    ),
    "state of all experts in a loop": (
        loops, STACK, tokens(), r"experts: .*tensor_scaling keeps one state.*grouped_mm"
    ),
}  # fmt: skip


@pytest.mark.slow
@uncompiled
@pytest.mark.filterwarnings("ignore:.*low_rank_residual:fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_every_forward_until_remove_raises_the_error_of_the_first(name):
    make, data, args, text = REFUSED[name]
    torch.manual_seed(0)
    model = make().eval()
    expected = model(*args)
    applied(model, data)
    error = CaptureError if name.startswith(("two", "a tech", "state")) else PolicyError
    for _ in range(2):
        with pytest.raises(error, match=text):
            model(*args)
    assert_equal([fp4graph.remove(model)(*args)], [expected])


def test_an_error_of_the_first_forward_stays_where_a_later_one_would_match_every_rule():
    class Branching(Net):
        def forward(self, x, both):
            return self.head(self.blocks(x)) if both else self.blocks(x)

    model = applied(Branching(), policy(rule("head", module="head"), rule(op="linear")))
    for both in (False, True):
        with pytest.raises(PolicyError, match="'head' matches no site"):
            model(X, both)


LATER = {
    "blocks.1.first": (nn.Linear(32, 48), lambda m: m(X), r"^blocks\.1\.first: "),
    "blocks.1.first, and its part is called": (nn.Linear(32, 48), lambda m: m.blocks[1](X), r"^blocks\.1\.first: "),
    "blocks.2": (Mlp(32, 48, 32), lambda m: m(X), r"^blocks\.2\.first: "),
}


@pytest.mark.slow
@uncompiled
@stances
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("name", LATER)
def test_a_module_that_is_added_after_apply_is_an_error(name, called, stance):
    module, call, text = LATER[name]
    model, exact = applied(Net(), "tetrajet"), applied(Net(), "bf16")
    with torch.compiler.set_stance(stance):
        for each in (model, exact):
            if called:
                each(X)
            each.set_submodule(name.partition(",")[0], copy.deepcopy(module))
        for _ in range(2):
            with pytest.raises(CaptureError, match=rf"{text}.*added to the model after fp4graph\.apply.*again"):
                call(model)
        call(applied(model, "tetrajet"))
        assert torch.equal(call(exact), call(fp4graph.remove(exact)))  # where nothing is quantized, any module may join


def test_a_module_in_a_plain_list_is_not_taken_for_one_that_was_added_later():
    judge = module_of(lambda self, x: self.net(self.hidden[0](x)), net=Net(), hidden=[nn.Linear(32, 32)])
    applied(judge, "tetrajet")(X)


@uncompiled
def test_a_part_is_refused_if_its_rule_depends_on_a_producer_that_did_not_run():
    keep = {"name": "after gelu", "match": {"op": "linear", "producer": "gelu"}, "keep": "exact"}
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), Mlp(32, 48, 32, F.gelu)) for _ in range(2)))
    applied(model, policy(keep, rule("rest", op="linear")))
    with pytest.raises(CaptureError, match="producer"):
        model[0][1].second(torch.randn(4, 48))
    assert_equal([model[1](model[0](X))], [model(X)])


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [lambda rnn: rnn, lambda rnn: weight_norm(rnn, "weight_ih_l0")])
def test_a_recurrent_layer_is_listed_though_it_is_in_no_graph(wrap):
    data = policy(rule(module="head"))
    model = applied(recurrent(wrap), data)
    model(*SEQUENCE)
    for sites in (fp4graph.explain(recurrent(wrap), data, SEQUENCE).sites, runtime_of(model).sites):
        listed = [(site.module, site.op, site.quantized) for site in sites]
        assert listed == [("head", "linear", True), ("rnn", "recurrent", False)]


def test_a_recurrent_layer_is_listed_beside_an_error():
    explanation = fp4graph.explain(recurrent(), "tetrajet", SEQUENCE)
    assert "only head would be quantized" in explanation.problem
    assert [(site.module, site.op) for site in explanation.sites] == [("head", "linear"), ("rnn", "recurrent")]


BLOCKS = {
    "attention over many tokens": (nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (torch.randn(2, 512, 32),)),
    "weight_norm": (nn.Sequential(weight_norm(nn.Linear(32, 32))), (X,)),
    "perceptron": (nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10)), (X,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_a_policy_for_blocks_quantizes_a_model_that_is_a_block(name):
    model, args = BLOCKS[name]
    explanation = fp4graph.explain(model, "tetrajet", args)
    assert explanation.problem is None
    assert {site.op for site in explanation.sites if not site.quantized} <= {"sdpa", "matmul"}


@pytest.mark.slow
def test_layers_whose_names_end_in_an_underscore_and_a_number_are_a_stack():
    model = torchvision.models.VisionTransformer(16, 8, 2, 2, hidden_dim=32, mlp_dim=64, num_classes=10)
    explanation = fp4graph.explain(model, "tetrajet", (torch.randn(2, 3, 16, 16),))
    assert {position.stack for position in explanation.blocks.values()} == {"encoder.layers.encoder_layer_*"}
    assert explanation.quantized == 8
    assert not next(site for site in explanation.sites if site.module == "heads.head").quantized


@pytest.mark.slow
def test_an_apply_that_fails_leaves_the_former_policy_in_force():
    model = applied(Net(), "tetrajet-qema")
    model(X)
    model.blocks[0].first._fp4graph_q_ema_weight += 1  # so that it differs from new state, which is the weight
    state = copy.deepcopy(model.state_dict())
    first_fails = mock.Mock(wraps=prepare.Tag, side_effect=[TypeError("the first tag"), *[mock.DEFAULT] * 9])
    with mock.patch.object(prepare, "Tag", first_fails), pytest.raises(TypeError, match="the first tag"):
        applied(model, "microscaling")
    assert first_fails.call_count > 1  # the further tags are of the restored policy
    assert runtime_of(model).policy.name == "tetrajet-qema"
    assert_equal(model.state_dict().values(), state.values())
    other = applied(Net(), "tetrajet-qema")
    other.load_state_dict(state)
    with torch.no_grad():
        assert_equal([model(X)], [other(X)])


@pytest.mark.parametrize("data", [one_rule("q_ema"), policy(default="keep", techniques=["stable_spam"])])
def test_an_optimizer_that_was_not_prepared_is_refused(data):
    """Also under a policy that quantizes nothing, if a technique acts on the whole optimizer."""
    model = applied(Net(), data)
    model(X).sum().backward()
    with pytest.raises(CaptureError, match="prepare_optimizer"):
        model(X)


def nested():
    model = Net()
    applied(model.blocks, "tetrajet")
    applied(model, "tetrajet")


def for_others():
    fp4graph.prepare_optimizer(applied(Net(), "tetrajet-qema"), torch.optim.SGD(Net().parameters(), lr=0.1))


ARGUMENTS = {
    "a function": (lambda: fp4graph.apply(F.relu, "tetrajet"), TypeError, r"nn\.Module"),
    "backend": (lambda: applied(Net(), "tetrajet", backend="tensorrt"), ValueError, "inductor, aot_eager, eager"),
    "a submodule": (nested, fp4graph.Error, "submodule 'blocks' has a policy"),
    "parameters of others": (for_others, fp4graph.Error, "does not hold"),
    "detect_nonfinite": (lambda: fp4graph.detect_nonfinite(Net()), fp4graph.Error, "prepared"),
    "set_total_forwards": (lambda: fp4graph.set_total_forwards(Net(), 3), fp4graph.Error, "prepared"),
    "remove": (lambda: fp4graph.remove(Net()), fp4graph.Error, "appl"),
    "bypass": (lambda: fp4graph.bypass(Net()), fp4graph.Error, "appl"),
    "grad_scaler": (lambda: fp4graph.grad_scaler(Net()), fp4graph.Error, "appl"),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_wrong_arguments(name):
    call, error, text = ARGUMENTS[name]
    with pytest.raises(error, match=text):
        call()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [{}, {"zero": "to_one"}, {"convention": "encode"}], ids=str)
def test_scales_that_a_cpu_flushes_are_refused(scale, monkeypatch):
    """Before the forward and, without an accelerator to which the model may move, by apply."""
    data, zeros = one_rule(quantize=quantizer() | {"scale": {"format": "e8m0", **scale}}), torch.zeros_like(X)
    before = applied(Net(), data)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert torch.set_flush_denormal(True)
    try:
        for call in (lambda: before(zeros), lambda: applied(Net(), data)(zeros)):
            says = pytest.raises(PolicyError, match=r"torch.set_flush_denormal\(False\)")
            with nullcontext() if scale else says:
                assert call().isfinite().all()
    finally:
        torch.set_flush_denormal(False)


def test_the_entry_point_serves_stateless_policies_and_refuses_others():
    def served(policy):
        torch._dynamo.reset()
        return torch.compile(Net(), backend="fp4graph", options={"policy": policy, "backend": "eager"})(X)

    assert_equal([served("microscaling")], [applied(Net(), "microscaling")(X)])
    for refused in ("tetrajet", one_rule(phases=[{"at": 5, "operands": {"dgrad": "keep"}}])):
        with pytest.raises(Exception, match=r"fp4graph\.apply"):
            served(refused)


@pytest.mark.process
def test_importing_initializes_no_cuda_and_loads_no_plugin():
    code = (
        "import sys, torch, fp4graph; assert not torch.cuda.is_initialized(); "
        "assert not [m for m in sys.modules if m.startswith('fp4graph_plugins') or m == 'pluggy']; "
        "assert fp4graph.QuantSpec and fp4graph.formats.E2M1.max == 6.0"
    )
    run(python("-c", code))


class Branches(nn.Module):
    """Calls one of two layers by ``torch.cond``."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.last = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        return self.last(torch.cond(x.sum() > 0, lambda x: self.one(x), lambda x: self.two(x), (x,)))


@pytest.mark.slow
def test_a_layer_in_a_branch_is_an_error_until_a_rule_keeps_it():
    with pytest.raises(Exception, match=r"a branch of torch\.cond .*keep the module by a rule"):
        applied(Branches(), one_rule())(torch.randn(4, 32))
    policy = one_rule()
    policy["rules"].insert(0, {"name": "branches", "match": {"module": ["one", "two"]}, "keep": "in branches"})
    assert applied(Branches(), policy)(torch.randn(4, 32)).shape == (4, 32)
