"""Products of tokens with copies of experts' matrices, picked by indices, become a grouped product or are an error.

The reference is a loop over experts with the program of an ordinary linear layer. ``tests/model/test_uncompiled.py``
compares the training of a model in this form with one that calls torch's grouped product.
"""

from __future__ import annotations

import operator
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.errors import CaptureError
from fp4graph.graph.functions import site_function
from fp4graph.graph.names import Names
from fp4graph.graph.plan import plan_site
from fp4graph.graph.rewrite import rewrite
from fp4graph.technique.site import SiteView
from tests.helpers import experts
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.training import applied, assert_equal, stances, uncompiled

EXPERTS, WIDTH, HIDDEN = 5, 48, 24
#: Unsorted, the second expert without tokens, and more than a block for the third.
IDS = torch.tensor([2, 0, 3, 2, 2, 4, 0, 3, 4, 4, *[2] * 30, 0, 2, 3, 4])
pytestmark = uncompiled
GROUPED = one_rule(op="grouped")
REFUSAL = r"copy of its expert's matrix.*grouped product"


class Gathers(nn.Module):
    """Calls ``multiply(x, w, ids)`` with a parameter."""

    def __init__(self, multiply, *shape: int) -> None:
        super().__init__()
        shape, generator = shape or (EXPERTS, WIDTH, HIDDEN), torch.Generator().manual_seed(0)
        # Experts of different size, so that a statistic of the wrong expert shows.
        size = torch.logspace(1, -1, shape[0])[:, None, None]
        self.multiply, self.w = multiply, nn.Parameter(torch.randn(shape, generator=generator) * size)

    def forward(self, x, ids):
        return self.multiply(x, self.w, ids)


def tokens(count=44, rows=1):
    """Return tokens ``[S, P, K]`` whose sizes differ by a factor of 10⁴."""
    x = torch.randn(count, rows, WIDTH, generator=torch.Generator().manual_seed(1))
    return (x * torch.logspace(-2, 2, count)[:, None, None]).requires_grad_()


def run(model, policy, x, ids=IDS, stance="default", autocast=False, **options):
    """Return y, dX and dW under ``policy``."""
    x = x.detach().requires_grad_()
    applied(model, policy, **options)
    with torch.compiler.set_stance(stance):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(x, ids)
        y.backward(gradient_of(y))
    return y.detach(), x.grad, model.w.grad


def gradient_of(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)


def looped(policy, x, w, ids, autocast=False):
    """Return y, dX and dW of a loop over experts: tokens ``x [S, P, K]``, weights ``w [E, N, K]``, ``ids [S]``."""
    rule = fp4graph.load_policy(policy).rules[-1]
    n, k = w.shape[1:]
    linear = site_function(plan_site(SiteView("experts", "linear", k, n, n * k), rule).program, "linear", 1.0, 1.0)
    y = torch.zeros(*x.shape[:-1], n, dtype=torch.bfloat16 if autocast else x.dtype)
    dy = gradient_of(y)
    dx, dw = torch.zeros_like(x), torch.zeros_like(w)
    for expert in range(w.shape[0]):
        routed = ids % w.shape[0] == expert
        if routed.any():
            inputs, weight = x[routed].flatten(0, 1).requires_grad_(), w[expert].clone().requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                result = linear(inputs, weight, None, None, None, 0)
            result.backward(dy[routed].flatten(0, 1))
            y[routed], dx[routed] = result.detach().view(y[routed].shape), inputs.grad.view(x[routed].shape)
            dw[expert] = weight.grad
    return y, dx, dw


#: For each form: a function of x [S, P, K], weights and ids that returns [S, P, N]; and whether the weights are stored
#: as [E, N, K].
FORMS = {
    "x @ W[ids]": (lambda x, w, ids: torch.bmm(x, w[ids]), False),
    "W[ids] @ x": (lambda x, w, ids: torch.bmm(w[ids], x.mT).mT, True),
    "x @ W[ids].mT": (lambda x, w, ids: torch.matmul(x, w[ids].transpose(-2, -1)), True),
    "W[ids].mT @ x": (lambda x, w, ids: (w[ids].permute(0, 2, 1) @ x.mT).mT, False),
    "x @ W.mT[ids]": (lambda x, w, ids: x @ w.mT[ids], True),
    "index_select": (lambda x, w, ids: x @ w.index_select(0, ids), False),
    "index_select by name": (lambda x, w, ids: x @ torch.index_select(w, dim=-3, index=ids), False),
    "negative": (lambda x, w, ids: x @ w[ids - EXPERTS, :], False),
    "int32": (lambda x, w, ids: x @ w[ids.int()].contiguous(), False),
    "two axes": (lambda x, w, ids: (x.unflatten(0, (4, -1)) @ w[ids.view(4, -1)]).flatten(0, 1), False),
    "indices that nobody else holds": (lambda x, w, ids: x @ w[torch.argsort(ids * 1.0) * 0 + ids], False),
}


def in_form(name):
    """Return a model that multiplies in one of the :data:`FORMS`."""
    multiply, transposed = FORMS[name]
    return Gathers(multiply, EXPERTS, *((HIDDEN, WIDTH) if transposed else (WIDTH, HIDDEN)))


@pytest.mark.slow
@stances
@pytest.mark.parametrize(
    ("name", "rows"), [*((name, 1 + 2 * (place % 2)) for place, name in enumerate(FORMS)), ("W[ids] @ x", 1)]
)
def test_each_form_equals_a_loop_over_experts_to_the_bit(name, rows, stance):
    model, x = in_form(name), tokens(len(IDS), rows)
    plain, transposed = model(x, IDS).detach(), FORMS[name][1]
    for policy in (GROUPED, one_rule("tensor_scaling", op="grouped", quantize=NVFP4)):
        model.w.grad = None
        y, dx, dw = run(model, policy, x, stance=stance)
        w = model.w.detach()
        assert_equal([y, dx, dw if transposed else dw.mT], looped(policy, x.detach(), w if transposed else w.mT, IDS))
        assert not dw[1].any()
        assert 0.02 < (y - plain).norm() / plain.norm() < 0.5
        fp4graph.remove(model)


@stances
@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "cast by hand"])
def test_bf16_copies_equal_a_loop_under_autocast(stance, autocast):
    """As in a linear layer under autocast, bf16 values are quantized; also where the model casts the copies itself."""
    by_hand = Gathers(lambda x, w, ids: x.bfloat16() @ w[ids].to(torch.bfloat16))
    model, x = in_form("x @ W[ids]") if autocast else by_hand, tokens()
    y, dx, dw = run(model, GROUPED, x, stance=stance, autocast=autocast)
    expected = looped(GROUPED, x.detach(), model.w.detach().mT, IDS, autocast=True)
    assert y.dtype is torch.bfloat16
    assert_equal([y, dx, dw.mT], expected)


@stances
def test_tokens_may_be_broadcast_over_copies(stance):
    model = Gathers(lambda x, w, ids: x.unsqueeze(1) @ w[ids.view(-1, 2)])
    half, policy = tokens(len(IDS) // 2), one_rule(op="grouped", operands={"backward": "keep"})
    y, dx, _ = run(model, policy, half, stance=stance)
    whole = half.detach().repeat_interleave(2, 0)
    expected, each, _ = looped(policy, whole, model.w.detach().mT, IDS)
    assert_equal([y.flatten(0, 1)], [expected])
    torch.testing.assert_close(dx, each.unflatten(0, (-1, 2)).sum(1), rtol=1e-6, atol=1e-6)


@stances
def test_no_tokens_and_no_gradients(stance):
    model, x = in_form("x @ W[ids]"), tokens()
    y, dx, dw = run(model, GROUPED, tokens(0), IDS[:0], stance=stance)
    assert (y.shape, dx.shape, dw.any()) == ((0, 1, HIDDEN), (0, 1, WIDTH), False)
    with torch.compiler.set_stance(stance), torch.no_grad():
        y = model(x, IDS)
    assert_equal([y], [looped(GROUPED, x.detach(), model.w.detach().mT, IDS)[0]])


@stances
@pytest.mark.parametrize(
    ("name", "ids"), [("x @ W[ids]", [0, EXPERTS]), ("x @ W[ids]", [0, -EXPERTS - 1]), ("index_select", [0, -1])]
)
def test_indices_that_torch_refuses_are_refused(name, ids, stance):
    model, x, ids = in_form(name), tokens(2), torch.tensor(ids)
    with pytest.raises(IndexError):
        model(x, ids)
    with pytest.raises(IndexError):
        run(model, GROUPED, x, ids, stance=stance)


@pytest.mark.slow
def test_one_graph_serves_any_number_of_tokens():
    results = []
    for dynamic in (True, False):
        model = applied(in_form("W[ids] @ x"), GROUPED, dynamic=dynamic)
        before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        results.append([model(tokens()[:count], IDS[:count]) for count in (12, 20, 40)])
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        if dynamic:
            assert graphs == 1
    assert_equal(*results)


# Sites, the census, and the rewritten graph.


def rewritten(model, policy):
    """Rewrite the model's graph under ``policy``. Return the targets of its calls, how many of these are grouped
    products of sites, and how many nodes have a matrix for each token."""
    graphs = []

    def backend(gm, _):
        rewrite(gm, fp4graph.load_policy(policy), Names(model), stateless=True)
        gm.graph.lint()
        graphs.append(gm)
        return gm

    torch.compile(model, backend=backend, fullgraph=True)(tokens(), IDS)
    (gm,) = graphs
    targets = [node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    sites = [
        name for name in (getattr(target, "__name__", "") for target in targets) if name.startswith("fp4graph_site_")
    ]
    assert all(name.startswith("fp4graph_site_grouped_") for name in sites)
    values = (node.meta.get("example_value") for node in gm.graph.nodes)
    shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
    copies = [shape for shape in shapes if shape in ((len(IDS), WIDTH, HIDDEN), (len(IDS), HIDDEN, WIDTH))]
    return targets, len(sites), len(copies)


def test_the_rewritten_graph_copies_no_matrix():
    targets, sites, copies = rewritten(in_form("x @ W[ids].mT"), "bf16")
    assert (targets[0], targets[-1], len(targets)) == (operator.getitem, torch.matmul, 3)
    assert (sites, copies) == (0, 2)
    targets, sites, copies = rewritten(in_form("x @ W[ids].mT"), GROUPED)
    assert torch.matmul not in targets
    assert (sites, copies) == (1, 0)


def test_copies_that_something_else_reads_stay():
    def multiply(x, w, ids):
        copies = w[ids]
        return torch.bmm(x, copies) + torch.bmm(x + 1, copies) + copies.sum()

    targets, sites, copies = rewritten(Gathers(multiply), GROUPED)
    assert torch.bmm not in targets
    assert (sites, copies) == (2, 1)


@pytest.mark.slow
@pytest.mark.inductor
def test_inductor_computes_what_eager_computes():
    """A compiled product may sum in another order, which changes some ulps of fp32."""
    model, other, x = in_form("W[ids] @ x"), in_form("W[ids] @ x"), tokens()
    torch.testing.assert_close(run(model, GROUPED, x, backend="inductor"), run(other, GROUPED, x), rtol=1e-5, atol=1e-5)
    with pytest.raises(RuntimeError, match="index out of bounds"):
        model(x, IDS + 1)


@pytest.mark.long
@pytest.mark.parametrize("op", [["linear", "grouped"], "linear", "grouped"], ids=str)
def test_explain_lists_the_sites_of_torchs_grouped_product(op):
    policy, args = one_rule(match={"op": op}), experts.tokens()
    explanation, grouped = (fp4graph.explain(experts.Mixture(form), policy, args) for form in ("gathered", "grouped"))
    assert explanation.sites == grouped.sites  # which tests/model/test_experts.py compares with expected values
    assert explanation.problem is None
    assert {site.quantized for site in explanation.sites if site.op == "grouped"} == {"grouped" in op}


@pytest.mark.long
@stances
def test_kept_experts_do_not_change_by_a_bit(stance):
    """Sites name the reason of the rule. A rule for experts behind a silu quantizes one of two products."""
    args, plain = experts.tokens(), experts.Mixture("gathered")
    policy = one_rule(op=["linear", "grouped"], operands={"fprop": "keep"})
    policy["rules"].insert(0, {"name": "experts", "match": {"op": "grouped"}, "keep": "not these"})
    model = applied(experts.Mixture("gathered"), policy)
    with torch.compiler.set_stance(stance):
        assert_equal([model(*args)], [plain(*args)])
    sites = [site for site in fp4graph.explain(plain, policy, args).sites if site.op == "grouped"]
    assert [(site.rule, site.reason, site.standing) for site in sites] == [("experts", "not these", "kept")] * 4
    after_silu = one_rule(match={"op": "grouped", "producer": "silu"})
    sites = [site for site in fp4graph.explain(plain, after_silu, args).sites if site.op == "grouped"]
    assert [site.quantized for site in sites] == [False, True] * 2


# Errors, and ordinary products.


def refused(model, policy=GROUPED, stance="default", x=None, *ids):
    """Assert that a call of the model is refused."""
    applied(model, policy)
    with torch.compiler.set_stance(stance), pytest.raises(CaptureError, match=REFUSAL):
        model(tokens() if x is None else x, *(ids or (IDS,)))


def writes_between(write, pick=lambda w, ids: w[ids]):
    """Return a function that calls ``write(x, w, ids, copies)`` between the copies and their product."""

    def multiply(x, w, ids):
        ids = ids.clone()
        copies = pick(w, ids)
        write(x, w, ids, copies)
        return x @ copies

    return multiply


REFUSED = {
    "second axis": lambda x, w, ids: x @ w.transpose(0, 1)[:, ids].transpose(0, 1),
    "embedding": lambda x, w, ids: x @ F.embedding(ids, w.flatten(1)).unflatten(1, (WIDTH, HIDDEN)),
    "gather": lambda x, w, ids: x @ w.gather(0, ids[:, None, None].expand(-1, WIDTH, HIDDEN)),
    "picked twice": lambda x, w, ids: x @ w[ids][ids],
    "two casts": lambda x, w, ids: x @ w[ids].half().float(),
    "an addend": lambda x, w, ids: torch.baddbmm(x[..., :1], x, w[ids]),
    "a grouped product": lambda x, w, ids: F.grouped_mm(
        x[:, 0].bfloat16(), w[ids[:2]].bfloat16(), offs=torch.tensor([9, 44], dtype=torch.int32)
    ),
    "scaled": lambda x, w, ids: x @ (w[ids] * 2),
    "gated": lambda x, w, ids: x @ (w[ids] * torch.sigmoid(x[..., :1])).relu().mT.contiguous().mT,
    "scaled in place": lambda x, w, ids: x @ (w[ids] * 2).mul_(3),
    "masked": lambda x, w, ids: (x * 1) @ w[ids].masked_fill(ids[:, None, None] > 3, 0.0),
    "chosen": lambda x, w, ids: x @ torch.where(w[ids] > 0, w[ids], 0.1),
    "joined": lambda x, w, ids: x @ torch.cat([w[ids[:9]], w[ids[9:]]]),
    "dropout": lambda x, w, ids: x @ F.dropout(w[ids], 0.5),
    "type": lambda x, w, ids: x.half() @ w[ids].type(torch.float16),
    "double": lambda x, w, ids: x.double() @ w[ids].double(),
    "indices written by another view": writes_between(
        lambda x, w, ids, copies: ids.clamp_(max=1), lambda w, ids: w[ids.view(-1)]
    ),
    "swapdims": lambda x, w, ids: (w[ids].swapdims(1, 2) @ x.mT).mT,
    "moveaxis": lambda x, w, ids: (w[ids].moveaxis(1, 2) @ x.mT).mT,
    "mH": lambda x, w, ids: (w[ids].mH @ x.mT).mT,
    "cpu": lambda x, w, ids: x @ w[ids].cpu(),
}


@stances
@pytest.mark.parametrize(
    ("name", "ops"),
    [*((name, ["linear", "matmul", "grouped"]) for name in REFUSED), ("gather", "linear"), ("gather", "grouped")],
)
def test_other_ways_to_pick_are_refused(name, ops, stance):
    refused(Gathers(REFUSED[name]), one_rule(match={"op": ops}), stance)


@torch.library.custom_op("gathered_experts::zero", mutates_args=["x"])
def zero(x: torch.Tensor) -> None:
    x.zero_()


WRITES = {
    "weight": lambda x, w, ids, copies: w.mul_(0),
    "weight.data": lambda x, w, ids, copies: w.data.zero_(),
    "ids.data": lambda x, w, ids, copies: ids.data.zero_(),
    "inplace by name": lambda x, w, ids, copies: F.relu(copies, inplace=True),
    "inplace by position": lambda x, w, ids, copies: F.dropout(copies, 0.5, True, True),
    "module": lambda x, w, ids, copies: nn.ReLU(inplace=True)(copies),
    "foreach": lambda x, w, ids, copies: torch._foreach_zero_([ids]),
    "copies": lambda x, w, ids, copies: copies.mul_(2),
    "foreach of copies": lambda x, w, ids, copies: torch._foreach_mul_([copies], 0.5),
    "an embedding that scales its weight": lambda x, w, ids, copies: F.embedding(ids, x.flatten(1), max_norm=1.0),
    "item": lambda x, w, ids, copies: ids.__setitem__(0, 1),
    "augmented": lambda x, w, ids, copies: operator.imul(ids, 0),
    "another kind of view": lambda x, w, ids, copies: ids.view_as(ids).as_strided((2,), (1,)).fill_(1),
    "several outputs": lambda x, w, ids, copies: torch.sort(ids.clone(), out=(torch.empty_like(ids), ids)),
    "overload": lambda x, w, ids, copies: torch.ops.aten.zero_.default(ids),
    "custom operator": lambda x, w, ids, copies: zero(ids),
    "something else": lambda x, w, ids, copies: torch.zeros(3).add_(1),
}


@stances
@pytest.mark.parametrize("name", WRITES)
def test_nothing_may_be_written_between_the_copies_and_their_product(name, stance):
    """No graph shows which tensors share memory, so a write into any tensor is refused."""
    with torch.no_grad():
        refused(Gathers(writes_between(WRITES[name])), GROUPED, stance, tokens().detach())


@stances
def test_a_write_into_an_input_that_shares_memory_with_the_indices_is_refused(stance):
    class Shares(Gathers):
        def forward(self, x, ids, same):
            copies = self.w[ids]
            same.zero_()
            return x @ copies

    ids = IDS.clone()
    refused(Shares(None), GROUPED, stance, tokens(), ids, ids.view(4, -1))


@pytest.mark.parametrize("ids", [IDS, IDS * 0], ids=["copies", "indices"])
def test_a_write_that_the_forward_does_not_show_is_refused(ids):
    """In an uncompiled forward an operation may bypass what watches it; the versions of the tensors show the write."""

    def hidden(x, w, ids, copies):
        with torch._C.DisableTorchFunction():
            (copies if ids[0] else ids).zero_()

    with torch.no_grad():
        refused(Gathers(writes_between(hidden)), GROUPED, "force_eager", tokens(), ids)


@stances
@pytest.mark.parametrize(
    "writes",
    [
        lambda x, w, ids: F.relu((x @ w[ids]).add_(1), inplace=True),
        lambda x, w, ids: x.clone().mul_(2) @ w[ids.clone().clamp_(max=3)],
        lambda x, w, ids: F.dropout(x, 0.0) @ w[ids],
    ],
    ids=["after", "before", "none"],
)
def test_writes_before_or_after_are_allowed(writes, stance):
    model, x = Gathers(writes), tokens()
    plain = model(x, IDS).detach()
    y, _, _ = run(model, GROUPED, x, stance=stance)
    assert 0.02 < (y - plain).norm() / plain.norm() < 0.5


@stances
@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize(
    "pick", [torch.no_grad()(lambda w, ids: w[ids]), lambda w, ids: w[ids].detach()], ids=["no_grad", "detach"]
)
def test_copies_without_gradients_give_their_weight_no_gradient(pick, gradient, stance):
    """torch gives the weight no gradient either, whether the tokens have one or not."""
    model = applied(Gathers(lambda x, w, ids: (x @ pick(w, ids), x @ w[ids])[0]), GROUPED)
    x = tokens().detach().requires_grad_(gradient)
    with torch.compiler.set_stance(stance):
        y = model(x, IDS)
    expected, dx, _ = looped(GROUPED, x.detach(), model.w.detach().mT, IDS)
    assert_equal([y], [expected])
    assert y.requires_grad == gradient
    if gradient:
        y.backward(gradient_of(y))
        assert_equal([x.grad], [dx])
    assert model.w.grad is None


@stances
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("from_master", [False, True])
def test_casting_copies_under_autocast_equals_casting_the_weight(from_master, dtype, stance):
    """Autocast casts to bf16, after the model's cast: a weight that overflows in fp16 is infinite."""
    policy = one_rule(op="grouped", quantize={**NVFP4, "from_master": from_master})

    def results(cast, stance="default"):
        model = Gathers(cast)
        with torch.no_grad():
            model.w[0, 0, 0] = 1e6
        return run(model, policy, tokens(), stance=stance, autocast=True)

    seen = results(lambda x, w, ids: x @ w[ids].to(dtype), stance)
    expected = results(lambda x, w, ids: x @ w.to(dtype)[ids])
    assert seen[0].isfinite().all() == (dtype is torch.bfloat16)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(seen, expected, strict=True))


def test_an_uncompiled_forward_keeps_no_cast_of_all_experts():
    def cast_and_pick(w, ids):
        cast = w.bfloat16()
        return weakref.ref(cast), cast[ids] * 1

    def multiply(x, w, ids):
        cast, _ = cast_and_pick(w, ids)
        assert cast() is None
        return x @ w[ids]

    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        applied(Gathers(multiply), GROUPED)(tokens(), IDS)
    refused(Gathers(lambda x, w, ids: x.bfloat16() @ w.bfloat16()[ids]), GROUPED, "force_eager")


def test_copies_picked_outside_of_a_checkpoint_are_refused():
    def multiply(x, w, ids):
        return checkpoint(torch.bmm, x, w[ids], use_reentrant=False)

    assert "copy of its expert's matrix" in fp4graph.explain(Gathers(multiply), GROUPED, (tokens(), IDS)).problem


@stances
def test_the_input_of_a_linear_layer_may_be_picked_by_indices(stance):
    """Indices pick six learned tokens for each sample."""
    weight = torch.randn(HIDDEN, WIDTH, generator=torch.Generator().manual_seed(3))

    class Prompts(Gathers):
        def __init__(self):
            super().__init__(None, EXPERTS, 6, WIDTH)
            self.linear = nn.Linear(WIDTH, HIDDEN, bias=False)
            self.linear.weight.data.copy_(weight)

        def forward(self, ids):
            return self.linear(self.w[ids])

    policy, model = one_rule(op=["linear", "grouped"]), Prompts()
    tokens = model.w.detach()[IDS]
    applied(model, policy)
    with torch.compiler.set_stance(stance):
        y = model(IDS).detach()
    expected = looped(policy, tokens.flatten(0, 1)[:, None], weight[None], IDS.repeat_interleave(6) * 0)[0]
    torch.testing.assert_close(y.flatten(0, 1), expected[:, 0], rtol=1e-5, atol=1e-5)


ACTIVATIONS = {
    "sum of products": lambda x, w, ids: torch.tanh((x.mT * w[ids]).sum(1, keepdim=True)) @ torch.ones(HIDDEN, 3),
    "a bias of scores": lambda x, w, ids: (x.mT @ x[..., :HIDDEN] + w[ids]).softmax(-1) @ x[..., :HIDDEN].mT,
    "keys behind learned ones": lambda x, w, ids: x @ torch.cat([(w[ids] * 2).mT, x], 1).mT,
}


@stances
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_computed_from_copies_are_factors_like_any_other(name, stance):
    model = applied(Gathers(ACTIVATIONS[name]), one_rule(op="matmul"))
    x = tokens().detach().requires_grad_()
    with torch.compiler.set_stance(stance):
        model(x, IDS).sum().backward()
    assert x.grad.isfinite().all()


def test_gathered_activations_are_factors_like_any_other():
    def multiply(x, w, ids):
        keys = torch.einsum("tk,ekn->etn", x[:, 0], w)  # activations [E, T, N]
        return torch.bmm(x[:, :, : len(IDS)], keys[ids])

    sites = fp4graph.explain(Gathers(multiply), one_rule(op="matmul"), (torch.randn(len(IDS), 1, WIDTH), IDS)).sites
    assert [site.op for site in sites if site.quantized] == ["matmul"]
