"""detect_nonfinite names the place where NaN or Inf arises, and changes nothing in a healthy step."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
import torch

import fp4graph
from tests.helpers.models import Mlp
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.training import applied, assert_equal, gradients


class Net(Mlp):
    """Has an attention mask of -inf before its two products."""

    def forward(self, x):
        return super().forward(torch.where(torch.arange(32) < 30, x, -torch.inf).softmax(-1))


POLICY = one_rule(quantize=quantizer(16), operands={"backward": {"rounding": "stochastic"}})
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.slow
def test_a_healthy_step_is_the_same_inside_detect_nonfinite():
    """Masks of -inf are ignored; noise and gradients are those of an unwatched model."""
    watched, plain = applied(Net(32, 48, 32), POLICY), applied(Net(32, 48, 32), POLICY)
    for _ in range(2):
        with fp4graph.detect_nonfinite(watched):
            watched(X).square().mean().backward()
        plain(X).square().mean().backward()
    assert_equal(gradients(watched), gradients(plain))
    assert watched(X).isfinite().all()
    assert not watched.first.weight._backward_hooks  # nothing is left on parameters


#: For each cause: what changes the model, the step that fails, and the text and the place of the error. sqrt at 0 has a
#: finite forward and an infinite gradient; in "product" dY is finite and dY·W is not.
CAUSES = {
    "weight": (
        lambda m: m.second.weight[3, 5].fill_(torch.nan), Net.__call__, "before this forward", "second.weight, forward"
    ),
    "input": (None, lambda m, x: m(torch.where(x == x[2, 3], torch.inf, x)), "before this forward", "input *, forward"),
    "overflow": (
        lambda m: [p.fill_(3e38) for p in m.first.parameters()], Net.__call__, "of finite values", "first, forward"
    ),
    "logarithm": (
        lambda m: setattr(m, "activation", lambda h: torch.log(h - 1e6)), Net.__call__, None, "(root) (log), forward"
    ),
    "root": (
        lambda m: setattr(m, "activation", lambda h: torch.sqrt(torch.relu(h))), lambda m, x: m(x).sum().backward(),
        "a gradient", "(root) (sqrt), backward",
    ),
    "product": (
        lambda m: m.second.weight.mul_(1e10), lambda m, x: m(x).backward(1e36 * SIGNS), "a gradient", "second, backward"
    ),
    "loss": (None, lambda m, x: (m(x).sum() * torch.inf).backward(), "arose in the loss", "the loss, backward"),
}  # fmt: skip
SIGNS = torch.tensor([1.0, -1.0]).repeat(4)[:, None].expand(8, 32)


@pytest.mark.slow
@pytest.mark.parametrize("cause", CAUSES)
def test_the_place_where_nan_or_inf_arises_is_named(cause):
    (change, step, text, site), model = CAUSES[cause], applied(Net(32, 48, 32), POLICY)
    if change:
        torch.no_grad()(change)(model)
    with fp4graph.detect_nonfinite(model), pytest.raises(fp4graph.NonFiniteError, match=text) as caught:
        step(model, X)
    assert fnmatchcase(caught.value.site, site)  # Dynamo names the input
    assert str(caught.value) == f"{caught.value.site}: {caught.value.message}"  # without FX's traceback


def item(h):
    h[0] = torch.nan
    return h


#: Activations that write into their argument, and the operation that makes NaN or Inf, or None.
WRITES = {
    "an item": (item, "setitem"),
    "the tensor": (lambda h: (h.masked_fill_(h > -1e9, torch.nan), h)[1], "masked_fill_"),
    "a view": (lambda h: (h.view(-1).fill_(torch.inf), h)[1], "fill_"),
    "repaired": (lambda h: (z := h / 0, z.nan_to_num_(0.0, 0.0, 0.0), z)[2], None),
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("multiplied", [True, False])
def test_a_write_into_a_tensor_is_named_and_may_repair_it(name, multiplied):
    activation, operation = WRITES[name]
    model = Mlp(32, 32, 32, lambda h: activation(h * 1))
    if not multiplied:  # the tensor that was written is the output
        model.second = torch.nn.Identity()
    applied(model, POLICY)
    with fp4graph.detect_nonfinite(model):
        if operation is None:
            assert model(X).isfinite().all()
            return
        with pytest.raises(fp4graph.NonFiniteError, match=rf"^\(root\) \({operation}\), forward: it made"):
            model(X)
