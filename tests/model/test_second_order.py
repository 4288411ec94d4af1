"""Derivatives of derivatives: ours to refuse under every backend, and those of the plain model in a bypass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.errors import CaptureError, Error
from tests.helpers.policies import one_rule

BACKENDS = ["eager", "aot_eager", "inductor"]
FAST = ["eager", "aot_eager"]
X, V, W = (torch.randn(4, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
LABELS = torch.tensor([0, 2, 1, 2])
POLICY = one_rule()
REFUSED = r"create_graph=True .* fp4graph\.bypass\(model\)"
pytestmark = pytest.mark.slow
uncompiled = pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")


class Net(nn.Module):
    """A layer norm and two linears."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.first, self.second = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        result: Tensor = self.second(F.gelu(self.first(self.norm(x))))
        return result


def scalar(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: F.cross_entropy(model(x), LABELS)


def gradients(loss: Tensor, model: nn.Module, **options: Any) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, **options)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, model.parameters(), strict=True)]


def hessian_diagonal(model: nn.Module) -> list[Tensor]:
    """As AdaHessian and Sophia-H: v·Hv of the parameters, after ``backward(create_graph=True)``."""
    first = gradients(scalar(model)(X), model, create_graph=True)
    return gradients(sum((g * g.detach().sign()).sum() for g in first), model)  # type: ignore[arg-type]


def r1(model: nn.Module) -> list[Tensor]:
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return gradients(slope.square().sum(), model)


def wgan_gp(model: nn.Module) -> list[Tensor]:
    mixed = (X + 0.3 * (V - X)).requires_grad_()
    (slope,) = torch.autograd.grad(model(mixed).mean(), mixed, create_graph=True)
    return gradients((slope.norm(dim=1) - 1).square().mean() + model(V).mean() - model(X).mean(), model)


def of_parameters(model: nn.Module) -> list[Tensor]:
    """A penalty on the gradient of the parameters, by ``.backward()``."""
    model.zero_grad()
    sum(g.square().sum() for g in gradients(scalar(model)(X), model, create_graph=True)).backward()  # type: ignore[union-attr]
    return [p.grad for p in model.parameters() if p.grad is not None]


def maml(model: nn.Module, *, create_graph: bool = True) -> list[Tensor]:
    slow = dict(model.named_parameters())
    inner = F.cross_entropy(functional_call(model, slow, (X,)), LABELS)
    steps = torch.autograd.grad(inner, list(slow.values()), create_graph=create_graph)
    fast = {name: p - 0.5 * step for (name, p), step in zip(slow.items(), steps, strict=True)}
    return gradients(F.cross_entropy(functional_call(model, fast, (V,)), LABELS), model)


CASES: dict[str, Callable[[nn.Module], Any]] = {
    "hvp": lambda m: functional.hvp(scalar(m), X, V)[1],
    "vhp": lambda m: functional.vhp(scalar(m), X, V)[1],
    "hessian": lambda m: functional.hessian(scalar(m), X),
    "jvp": lambda m: functional.jvp(m, X, V)[1],
    "Jacobian with a graph": lambda m: functional.jacobian(m, X, create_graph=True).detach(),
    "R1": r1,
    "WGAN-GP": wgan_gp,
    "MAML": maml,
    "AdaHessian": hessian_diagonal,
    "penalty of the parameters' gradient": of_parameters,
}


def plain(case: Callable[[nn.Module], Any]) -> Any:
    return case(Net())


@pytest.mark.parametrize("backend", BACKENDS)
def test_second_derivatives_are_refused_and_run_in_a_bypass(backend):
    model = fp4graph.apply(Net(), POLICY, backend=backend)
    for name, case in CASES.items():
        with pytest.raises(Error, match=REFUSED):
            pytest.fail(f"{name} is {case(model)}")
        with fp4graph.bypass(model):
            torch.testing.assert_close(case(model), plain(case), rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("backend", FAST)
def test_the_entry_point_refuses_the_same(backend):
    model = torch.compile(Net(), backend="fp4graph", options={"policy": POLICY, "backend": backend})
    for name in ("hvp", "R1", "penalty of the parameters' gradient"):
        with pytest.raises(Error, match=REFUSED):
            CASES[name](model)


@uncompiled
@pytest.mark.parametrize("call", [lambda m, x: m.forward(x), lambda m, x: m.second(F.gelu(m.first(m.norm(x))))])
def test_what_runs_uncompiled_refuses_the_same(call):
    model = fp4graph.apply(Net(), POLICY, backend="aot_eager")
    x = X.clone().requires_grad_()
    with pytest.raises(Error, match=r"^second: .*" + REFUSED):
        torch.autograd.grad(call(model, x).sum(), x, create_graph=True)


@uncompiled
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", FAST)
def test_under_checkpointing_too(backend, reentrant):
    model = fp4graph.apply(Net(), POLICY, backend=backend)

    def loss():
        return checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).square().sum()

    model(X).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    if not reentrant:  # the backward in a reentrant one has no graph, and torch's own has no second order either
        with pytest.raises(Error, match=REFUSED):
            torch.autograd.grad(loss(), list(model.parameters()), create_graph=True)


def test_compiled_autograd_runs_the_same_backward():
    model = fp4graph.apply(Net(), POLICY, backend="aot_eager")
    expected = gradients(scalar(model)(X), model)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        scalar(model)(X).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))


class Attention(nn.Module):
    """Products of activations alone, fused or written out."""

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        """Return attention's output of one head for ``x [4, 16]``."""
        x = x.reshape(1, 1, 4, 16)
        if self.op == "sdpa":
            return F.scaled_dot_product_attention(x, x, x)
        return torch.softmax(x @ x.mT, -1) @ x


@pytest.mark.parametrize("op", ["matmul", "sdpa"])
@pytest.mark.parametrize("backend", FAST)
def test_products_of_activations_refuse_the_same(backend, op):
    model = fp4graph.apply(Attention(op), one_rule(op=op), backend=backend)
    with pytest.raises(Error, match=REFUSED):
        functional.hvp(lambda x: model(x).square().sum(), X, V)
    with fp4graph.bypass(model), sdpa_kernel(SDPBackend.MATH):  # torch's fused one has no second derivative on a CPU
        bypassed = functional.hvp(lambda x: model(x).square().sum(), X, V)
        expected = functional.hvp(lambda x: Attention(op)(x).square().sum(), X, V)
    torch.testing.assert_close(bypassed, expected, rtol=1e-5, atol=1e-5)


class Written(nn.Module):
    """Writes the result of a linear into a tensor that it was given, behind which the graph's outputs do not lie."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor, into: Tensor) -> Tensor:
        """Return nothing that needs a gradient."""
        into.add_(self.fc(x))
        return x.detach().sum()


@pytest.mark.parametrize("backend", FAST)
def test_a_tensor_that_a_graph_has_written_to_refuses_the_same(backend):
    model, into = fp4graph.apply(Written(), POLICY, backend=backend), torch.zeros(4, 16)
    model(X, into)
    with pytest.raises(Error, match=REFUSED):
        torch.autograd.grad(into.square().sum(), model.fc.weight, create_graph=True)


class Views(nn.Module):
    """Returns a result with a view of it, and a view of its input."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tensors that share memory."""
        y = self.fc(x)
        return y, y.view(-1), x.view(-1)


@pytest.mark.parametrize("backend", FAST)
def test_writes_to_views_hide_no_backward(backend):
    model, x = fp4graph.apply(Views(), POLICY, backend=backend), X.clone().requires_grad_()
    y, view, of_input = model(x)
    (slope,) = torch.autograd.grad(of_input.pow(3).sum(), x, create_graph=True)  # passes no product
    torch.testing.assert_close(slope, 3 * x.square())
    view.mul_(2)
    for used in (y, view):
        with pytest.raises(Error, match=REFUSED):
            torch.autograd.grad(used.square().sum(), model.fc.weight, create_graph=True)
    model, whole = fp4graph.apply(Written(), POLICY, backend=backend), torch.zeros(4, 32)
    model(X, whole[:, :16])
    with pytest.raises(Error, match=REFUSED):
        torch.autograd.grad(whole.square().sum(), model.fc.weight, create_graph=True)


@pytest.mark.parametrize("backend", FAST)
def test_what_passes_no_quantized_product_is_right(backend):
    # The loss is differentiated twice by the logits: Σ pᵢ(1-pᵢ) is the trace of diag(p) - ppᵀ, for each row.
    model = fp4graph.apply(Net(), POLICY, backend=backend)
    logits = model(X)
    (slope,) = torch.autograd.grad(F.cross_entropy(logits, LABELS, reduction="sum"), logits, create_graph=True)
    traces = [torch.autograd.grad(slope[:, i].sum(), logits, retain_graph=True)[0][:, i] for i in range(3)]
    p = torch.softmax(logits.detach(), -1)
    torch.testing.assert_close(sum(traces), (p * (1 - p)).sum(-1))
    # A penalty on the input of the model, and on what a user has made of the output in place.
    x = X.clone().requires_grad_()
    y = model(x.tanh()).mul_(2)
    (slope,) = torch.autograd.grad(x.tanh().square().sum(), x, create_graph=True)
    (slope.square().sum() + y.sum()).backward()
    nothing = fp4graph.apply(Net(), "bf16", backend="eager")
    for case in CASES.values():
        torch.testing.assert_close(case(nothing), plain(case), rtol=1e-5, atol=1e-7)


def test_a_penalty_on_a_kept_layer_is_the_straight_through_one_under_eager():
    policy = one_rule(match={"module": "first"})

    def penalty(weight: Tensor, logits: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(F.cross_entropy(logits, LABELS), weight, create_graph=True)
        return slope.square().sum()

    model, reference = fp4graph.apply(Net(), policy, backend="eager"), Net()
    penalty(model.second.weight, model(X)).backward()
    # first, by hand: Y = Q(X)·Q(W)ᵀ + b, dW = Q(dYᵀ)·Q(Xᵀ)ᵀ, blocks along the contraction.
    spec, x = fp4graph.QuantSpec(scale=fp4graph.ScaleSpec("e8m0", "ceil")), reference.norm(X).detach()
    first = reference.first
    y = fp4graph.fake_quantize(x, spec) @ fp4graph.fake_quantize(first.weight.detach(), spec).T + first.bias.detach()
    y.requires_grad_()
    penalty(reference.second.weight, reference.second(F.gelu(y))).backward()
    assert y.grad is not None
    expected = fp4graph.fake_quantize(y.grad, spec, 0).T @ fp4graph.fake_quantize(x, spec, 0)
    torch.testing.assert_close(model.first.weight.grad, expected, rtol=1e-5, atol=1e-9)
    with pytest.raises(Error, match=REFUSED):  # the compiled backward is of the whole graph
        penalty((refused := fp4graph.apply(Net(), policy, backend="aot_eager")).second.weight, refused(X))


@pytest.mark.parametrize("backend", FAST)
def test_first_derivatives_need_no_bypass(backend):
    model = fp4graph.apply(Net(), POLICY, backend=backend)
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


FORWARD_MODE: dict[str, Callable[[nn.Module], Tensor]] = {
    "torch.func.jvp": lambda m: torch.func.jvp(m, (X,), (V,))[1],
    "torch.func.hessian": lambda m: torch.func.hessian(scalar(m))(X),
    "forward-mode Jacobian": lambda m: functional.jacobian(m, X, vectorize=True, strategy="forward-mode"),
}


def dual(model: nn.Module) -> Tensor:
    with forward_ad.dual_level():
        tangent: Tensor = forward_ad.unpack_dual(model(forward_ad.make_dual(X, V))).tangent
    return tangent


@uncompiled
def test_forward_mode_is_refused_and_runs_in_a_bypass():
    model = fp4graph.apply(Net(), POLICY, backend="eager")
    model(X)
    for case in (*FORWARD_MODE.values(), dual):
        with pytest.raises(Error, match=r"torch\.func .* or forward-mode .* fp4graph\.bypass\(model\)"):
            case(model)
        with pytest.raises(Error, match=r"torch\.func .* or forward-mode"):
            case(model.forward)
        with fp4graph.bypass(model):
            torch.testing.assert_close(case(model), plain(case), rtol=1e-5, atol=1e-7)


class Force(nn.Module):
    """Differentiates its own energy by the input, as networks for molecules do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.net, self.how = Net(), how

    def forward(self, x: Tensor) -> Tensor:
        """Return the slope of the energy."""
        if self.how == "torch.func":
            return torch.func.grad(lambda x: self.net(x).sum())(x)
        x = x.requires_grad_()
        return torch.autograd.grad(self.net(x).sum(), x, create_graph=self.how == "with a graph")[0]


@pytest.mark.parametrize("backend", FAST)
def test_derivatives_inside_of_a_forward(backend):
    with pytest.raises(Error, match=REFUSED):
        fp4graph.apply(Force("with a graph"), POLICY, backend=backend)(X.clone()).square().sum().backward()
    with pytest.raises(CaptureError, match=r"^net\.first: torch\.func .* by a rule"):
        fp4graph.apply(Force("torch.func"), POLICY, backend=backend)(X.clone())
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):  # still allowed, as checkpoints need them
        pass
    if backend == "aot_eager":  # under eager, Dynamo compiles our backward function by function, for ten seconds
        slope = fp4graph.apply(Force("first order"), POLICY, backend=backend)(X.clone())
        x = X.clone().requires_grad_()
        (expected,) = torch.autograd.grad(fp4graph.apply(Net(), POLICY, backend=backend)(x).sum(), x)
        assert torch.equal(slope, expected)
