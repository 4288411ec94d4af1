"""Products whose first factor is the weight, ``W @ X``, as Mamba has them: linear layers of the columns of X."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph
from fp4graph.technique.operands import Operand
from tests.helpers.models import module_of
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, assert_equal, prepared, stances, train, uncompiled

N, K, T = 40, 48, 24
#: How a layer with weight ``[N, K]`` and bias ``[N]`` multiplies ``x [..., K, T]``, and the leading axes of x.
FORMS = {
    "@": (lambda w, b, x: w @ x + b[:, None], (3,)),
    "@ of matrices": (lambda w, b, x: w @ x + b[:, None], ()),
    "__rmatmul__": (lambda w, b, x: x.__rmatmul__(w) + b[:, None], (3,)),
    "einsum": (lambda w, b, x: torch.einsum("nk,bkt->bnt", w, x) + b[:, None], (3,)),
    "einsum with ...": (lambda w, b, x: torch.einsum("nk,...kt->...nt", w, x) + b[:, None], (3,)),
    "transposed twice": (lambda w, b, x: (w.t().mT @ x) + b[:, None], (3,)),
    "addmm": (lambda w, b, x: torch.addmm(b[:, None], w, x), ()),
    "addmm of a matrix": (lambda w, b, x: torch.addmm(b[:, None].expand(N, T), w, x), ()),
    "addmm of a row": (lambda w, b, x: torch.addmm(x[0], w, x) - x[0] + b[:, None], ()),
}


def layer(form):
    torch.manual_seed(0)
    multiply = FORMS[form][0] if form else lambda w, b, x: (F.linear(x.mT, w) + b).mT
    made = module_of(lambda self, x: multiply(self.linear.weight, self.linear.bias, x), linear=nn.Linear(K, N))
    nn.init.normal_(made.linear.bias)
    return made


def columns(form, seed=0):
    return torch.randn(*FORMS[form][1], K, T, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@uncompiled
@stances
@pytest.mark.parametrize("form", FORMS)
def test_all_six_operands_are_quantized_along_the_contraction(form, stance):
    model, x = applied(layer(form), one_rule()), columns(form)
    w, b = model.linear.weight, model.linear.bias
    dy = torch.randn(*x.shape[:-2], N, T, generator=torch.Generator().manual_seed(1))
    with torch.compiler.set_stance(stance):
        y = model(x)
    q = partial(fp4graph.fake_quantize, spec=fp4graph.load_policy(one_rule()).rules[0].specs.six[0])
    with torch.no_grad():
        # The tokens of all matrices are one axis, along which wgrad contracts.
        tokens, gradients = (t.movedim(-2, 0).flatten(1) for t in (x, dy))
        expected = (
            q(w, dim=1) @ q(x, dim=-2) + b[:, None],
            q(w, dim=0).mT @ q(dy, dim=-2),
            q(gradients, dim=1) @ q(tokens, dim=1).mT,
        )
    # The operands are equal to the bit; fp32 sums of up to 72 products of size 10 run in another order.
    for result, reference in zip((y, *torch.autograd.grad(y, (x, w), dy)), expected, strict=True):
        if form != "addmm of a row" or result.shape == w.shape:  # X reaches the result a second time
            torch.testing.assert_close(result, reference, rtol=0, atol=1e-4)
    assert y.stride() == layer(form)(x).stride()


@uncompiled
@stances
@pytest.mark.parametrize("policy", ["tetrajet-qema", "averis"])  # state like the weight and noise; a wrapper
def test_the_layer_trains_as_a_linear_layer_of_the_columns(policy, stance):
    results = []
    for form in ("@", None):
        model = applied(layer(form), policy, seed=1, total_forwards=9)
        optimizer = prepared(model)
        model.linear.bias.requires_grad_(False)  # its gradient is a sum in another order
        with torch.compiler.set_stance(stance):
            results.append(train(model, optimizer, [(columns("@", seed),) for seed in range(3)]))
    assert_equal(*results)


@uncompiled
@stances
@pytest.mark.parametrize("form", FORMS)
def test_a_policy_that_quantizes_nothing_leaves_torchs_operation(form, stance):
    plain, x = layer(form), columns(form)
    expected = plain(x)
    with torch.compiler.set_stance(stance):
        assert torch.equal(applied(plain, "bf16")(x), expected)


def test_explain_shows_the_site_of_a_linear_layer():
    (site,) = fp4graph.explain(layer("@"), one_rule(), (columns("@"),)).sites
    assert (site.module, site.op, site.quantized) == ("linear", "linear", True)
    assert (site.shapes, site.flops) == (((3, T, K), (N, K)), 2 * 3 * T * K * N)
    assert site.operands[Operand.FPROP_WEIGHT] is not None


@uncompiled
@stances
def test_an_einsum_is_written_out_where_a_rule_names_the_module_of_its_weight(stance):
    policy = one_rule(match={"op": "linear", "module": "linear"})
    outputs = []
    for form in ("einsum with ...", "@"):
        with torch.compiler.set_stance(stance):
            outputs.append(applied(layer(form), policy)(columns("@")))
    assert torch.equal(*outputs)


@uncompiled
@stances
def test_a_stack_of_weights_multiplies_each_its_own_matrix(stance):
    torch.manual_seed(0)
    model = module_of(lambda self, x: self.w @ x, w=nn.Parameter(torch.randn(3, N, K)))
    x, q = columns("@"), partial(fp4graph.fake_quantize, spec=fp4graph.load_policy(one_rule()).rules[0].specs.six[0])
    with torch.compiler.set_stance(stance):
        y = applied(model, one_rule())(x)
    torch.testing.assert_close(y, q(model.w, dim=2) @ q(x, dim=1), rtol=0, atol=1e-4)  # sums in another order
