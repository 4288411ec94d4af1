"""Second derivatives through quantized products are refused; in a bypass they equal the plain model's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._functorch import config as functorch
from torch.autograd import forward_ad, functional
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.errors import CaptureError, Error
from tests.helpers.models import module_of
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, assert_equal, uncompiled
from tests.helpers.training import gradients as grads

backends = pytest.mark.parametrize("backend", ["eager", "aot_eager"])
X, V, W = (torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
LABELS = torch.tensor([0, 2, 1, 2])
POLICY = one_rule()
REFUSED = r"create_graph=True .* fp4graph\.bypass\(model\)"
pytestmark = pytest.mark.slow


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x):
        return self.second(F.gelu(self.first(self.norm(x))))


def scalar(model):
    return lambda x: F.cross_entropy(model(x), LABELS)


def gradients(loss, model, **options):
    return torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True, **options)


def refused():
    return pytest.raises(Error, match=REFUSED)


def hessian_diagonal(model):
    """Return Hv for v = sign(g), from gradients g with ``create_graph=True``, as AdaHessian and Sophia-H compute it."""
    first = gradients(scalar(model)(X), model, create_graph=True)
    return gradients(sum((g * g.detach().sign()).sum() for g in first), model)


def r1(model):
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradients(slope.square().sum(), model)


def wgan_gp(model):
    mixed = (X + 0.3 * (V - X)).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).mean(), mixed, create_graph=True)
    return gradients((slope.norm(dim=1) - 1).square().mean() + model(V).mean() - model(X).mean(), model)


def parameter_penalty(model):
    """Return the gradients, by ``.backward()``, of a penalty on the gradients of the parameters."""
    model.zero_grad()
    sum(g.square().sum() for g in gradients(scalar(model)(X), model, create_graph=True)).backward()
    return grads(model)


def maml(model, *, create_graph=True):
    slow = dict(model.named_parameters())
    inner = F.cross_entropy(functional_call(model, slow, (X,)), LABELS)
    steps = torch.autograd.grad(inner, list(slow.values()), create_graph=create_graph)
    fast = {name: p - 0.5 * step for (name, p), step in zip(slow.items(), steps, strict=True)}
    return gradients(F.cross_entropy(functional_call(model, fast, (V,)), LABELS), model)


CASES = {
    "hvp": lambda m: functional.hvp(scalar(m), X, V)[1],
    "vhp": lambda m: functional.vhp(scalar(m), X, V)[1],
    "hessian": lambda m: functional.hessian(scalar(m), X),
    "jvp": lambda m: functional.jvp(m, X, V)[1],
    "Jacobian with a graph": lambda m: functional.jacobian(m, X, create_graph=True).detach(),
    "R1": r1,
    "WGAN-GP": wgan_gp,
    "MAML": maml,
    "AdaHessian": hessian_diagonal,
    "penalty of the parameters' gradient": parameter_penalty,
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_second_derivatives_are_refused_and_run_in_a_bypass(backend):
    model = applied(Net(), POLICY, backend=backend)
    for name, case in CASES.items():
        with refused():
            pytest.fail(f"{name} is {case(model)}")
        with fp4graph.bypass(model):
            torch.testing.assert_close(case(model), case(Net()), rtol=1e-5, atol=1e-7, msg=name)


@backends
def test_the_entry_point_refuses_second_derivatives(backend):
    model = torch.compile(Net(), backend="fp4graph", options={"policy": POLICY, "backend": backend})
    for name in ("hvp", "R1", "penalty of the parameters' gradient"):
        with refused():
            CASES[name](model)


@uncompiled
def test_uncompiled_forwards_refuse_second_derivatives():
    model, x = applied(Net(), POLICY, backend="aot_eager"), X.clone().requires_grad_()
    for call in (model.forward, lambda x: model.second(F.gelu(model.first(model.norm(x))))):
        with pytest.raises(Error, match=r"^second: .*" + REFUSED):
            torch.autograd.grad(call(x).sum(), x, create_graph=True)


@uncompiled
@pytest.mark.parametrize("reentrant", [False, True])
@backends
def test_a_checkpoint_changes_no_gradient_and_refuses_second_derivatives(backend, reentrant):
    model = applied(Net(), POLICY, backend=backend)

    def loss():
        return checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).square().sum()

    model(X).square().sum().backward()
    expected = grads(model)
    model.zero_grad()
    loss().backward()
    assert_equal(grads(model), expected)
    if not reentrant:  # a reentrant checkpoint's backward has no graph, in plain torch too
        with refused():
            torch.autograd.grad(loss(), list(model.parameters()), create_graph=True)


def test_compiled_autograd_runs_the_same_backward():
    model = applied(Net(), POLICY, backend="aot_eager")
    expected = gradients(scalar(model)(X), model)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        scalar(model)(X).backward()
    assert_equal(grads(model), expected)


#: Products of activations alone, fused or written out.
ATTENTION = {
    "sdpa": lambda self, x: F.scaled_dot_product_attention(*[x.reshape(1, 1, 4, 16)] * 3),
    "matmul": lambda self, x: torch.softmax(x @ x.mT, -1) @ x,
}


@pytest.mark.parametrize("op", ATTENTION)
@backends
def test_products_of_activations_refuse_second_derivatives(backend, op):
    def second(model):
        return functional.hvp(lambda x: model(x).square().sum(), X, V)

    model = applied(module_of(ATTENTION[op]), one_rule(op=op), backend=backend)
    with refused():
        second(model)
    with (
        fp4graph.bypass(model),
        sdpa_kernel(SDPBackend.MATH),
    ):  # torch's fused attention has no second derivative on a CPU
        torch.testing.assert_close(second(model), second(module_of(ATTENTION[op])), rtol=1e-5, atol=1e-5)


@backends
@pytest.mark.parametrize("width", [16, 32], ids=["a tensor", "a part of a tensor"])
def test_a_tensor_that_a_graph_has_written_to_refuses_second_derivatives(backend, width):
    class Written(nn.Linear):  # the graph's output does not depend on the product; only the write does
        def forward(self, x, into):
            into.add_(super().forward(x))
            return x.detach().sum()

    model, into = applied(Written(16, 16), POLICY, backend=backend), torch.zeros(4, width)
    model(X, into[:, :16])
    with refused():
        torch.autograd.grad(into.square().sum(), model.weight, create_graph=True)


@backends
def test_second_derivatives_are_refused_after_a_write_to_a_view_of_the_output(backend):
    class Views(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.view(-1), x.view(-1)

    model, x = applied(Views(16, 16), POLICY, backend=backend), X.clone().requires_grad_()
    y, view, of_input = model(x)
    (slope,) = torch.autograd.grad(of_input.pow(3).sum(), x, create_graph=True)  # passes no product
    torch.testing.assert_close(slope, 3 * x.square())
    view.mul_(2)
    for used in (y, view):
        with refused():
            torch.autograd.grad(used.square().sum(), model.weight, create_graph=True)


@backends
def test_second_derivatives_that_pass_no_quantized_product_are_right(backend):
    # The loss is differentiated twice by the logits: Σ pᵢ(1-pᵢ) is the trace of diag(p) - ppᵀ, for each row.
    model = applied(Net(), POLICY, backend=backend)
    logits = model(X)
    (slope,) = torch.autograd.grad(F.cross_entropy(logits, LABELS, reduction="sum"), logits, create_graph=True)
    traces = [torch.autograd.grad(slope[:, i].sum(), logits, retain_graph=True)[0][:, i] for i in range(3)]
    p = torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(sum(traces), (p * (1 - p)).sum(-1))
    # The penalty does not pass the model, whose output the user writes in place.
    x = X.clone().requires_grad_()
    y = model(x.tanh()).mul_(2)
    (slope,) = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
    (slope.square().sum() + y.sum()).backward()
    nothing = applied(Net(), "bf16")
    for case in CASES.values():
        torch.testing.assert_close(case(nothing), case(Net()), rtol=1e-5, atol=1e-7)


def test_a_penalty_on_a_kept_layer_passes_quantized_layers_straight_through_under_eager():
    policy = one_rule(match={"module": "first"})

    def penalty(weight, logits):
        (slope,) = torch.autograd.grad(F.cross_entropy(logits, LABELS), weight, create_graph=True)
        return slope.square().sum()

    model, reference = applied(Net(), policy), Net()
    penalty(model.second.weight, model(X)).backward()
    # The layer `first` by hand: Y = Q(X)·Q(W)ᵀ + b, dW = Q(dYᵀ)·Q(Xᵀ)ᵀ, blocks along the contraction.
    spec, x = fp4graph.QuantSpec(scale=fp4graph.ScaleSpec("e8m0", "ceil")), reference.norm(X).detach()
    first = reference.first
    y = fp4graph.fake_quantize(x, spec) @ fp4graph.fake_quantize(first.weight.detach(), spec).T + first.bias.detach()
    y.requires_grad_()
    penalty(reference.second.weight, reference.second(F.gelu(y))).backward()
    expected = fp4graph.fake_quantize(y.grad, spec, 0).T @ fp4graph.fake_quantize(x, spec, 0)
    torch.testing.assert_close(model.first.weight.grad, expected, rtol=1e-5, atol=1e-9)
    with refused():  # under aot_eager the backward of the whole graph is one node
        compiled = applied(Net(), policy, backend="aot_eager")
        penalty(compiled.second.weight, compiled(X))


@backends
def test_first_derivatives_need_no_bypass(backend):
    model = applied(Net(), POLICY, backend=backend)
    logits = model(X)
    weight, steps = model.first.weight, torch.eye(3)[:, None].repeat(1, 4, 1)
    rows = [torch.autograd.grad(logits, weight, step, retain_graph=True)[0] for step in steps]
    (batched,) = torch.autograd.grad(logits, weight, steps, is_grads_batched=True)
    assert torch.equal(batched, torch.stack(rows))
    jacobian = functional.jacobian(model, X)
    assert torch.equal(functional.jacobian(model, X, vectorize=True), jacobian)
    _, product = functional.vjp(model, X, torch.ones(4, 3))
    torch.testing.assert_close(product, torch.autograd.grad(model(x := X.clone().requires_grad_()).sum(), x)[0])
    assert any(g.any() for g in maml(model, create_graph=False))  # first-order MAML


@pytest.mark.inductor
def test_a_second_backward_reads_what_the_first_kept_although_cached_code_overwrites_it():
    def backwards(times):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))
        model = applied(layers, one_rule(), backend="inductor")
        loss = model(torch.ones(4, 64)).square().sum()
        return [torch.autograd.grad(loss, [*model.parameters()], retain_graph=n < times - 1) for n in range(times)]

    backwards(1)  # Inductor's cache now has code that overwrites
    with functorch.patch(donated_buffer=False):
        first, second = backwards(2)
    assert_equal(first, second)


def dual(model):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(X, V))).tangent


FORWARD_MODE = {
    "dual numbers": dual,
    "torch.func.jvp": lambda m: torch.func.jvp(m, (X,), (V,))[1],
    "torch.func.hessian": lambda m: torch.func.hessian(scalar(m))(X),
    "forward-mode Jacobian": lambda m: functional.jacobian(m, X, vectorize=True, strategy="forward-mode"),
}


@uncompiled
@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_is_refused_and_runs_in_a_bypass(name):
    model, case = applied(Net(), POLICY), FORWARD_MODE[name]
    model(X)
    for call in (model, model.forward):
        with pytest.raises(Error, match=r"torch\.func .* or forward-mode .* fp4graph\.bypass\(model\)"):
            case(call)
    with fp4graph.bypass(model):
        torch.testing.assert_close(case(model), case(Net()), rtol=1e-5, atol=1e-7)


@backends
def test_derivatives_inside_of_a_forward(backend):
    """A model differentiates its own energy by the input, as networks for molecules do."""

    def force(**options):
        def forward(self, x):
            return torch.autograd.grad(self.net(x.requires_grad_()).sum(), x, **options)[0]

        return applied(module_of(forward, net=Net()), POLICY, backend=backend)(X.clone())

    with refused():
        force(create_graph=True).square().sum().backward()
    functional_force = module_of(lambda self, x: torch.func.grad(lambda x: self.net(x).sum())(x), net=Net())
    with pytest.raises(CaptureError, match=r"^net\.first: torch\.func .* by a rule"):
        applied(functional_force, POLICY, backend=backend)(X.clone())
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x, lambda x: x
    ):  # hooks are allowed again: checkpoints need them
        pass
    if backend == "aot_eager":  # under eager Dynamo compiles for ten seconds, function by function
        slope = force()
        x = X.clone().requires_grad_()
        (expected,) = torch.autograd.grad(applied(Net(), POLICY, backend=backend)(x).sum(), x)
        assert torch.equal(slope, expected)
