"""stable_spam around other optimizers equals fp4graph.optim.StableSPAM, whose equations tests/training checks."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import timm.optim
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fp4graph
from fp4graph.optim import StableSPAM
from fp4graph.training import conditioning
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.steps import assert_resumes, push, same, spiky
from tests.helpers.training import applied

CONDITIONING = {
    "gamma1": 0.6, "gamma2": 0.8, "theta": 0.97, "total_steps": 31, "eta_min": 0.3, "reset_interval": 10,
}  # fmt: skip
ADAM = {"lr": 0.02, "betas": (0.85, 0.99), "weight_decay": 0.1}


class Several(nn.Module):
    """Parameters of many shapes, and a linear. No test calls the model, because all gradients are prescribed."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linear = nn.Linear(16, 4)
        shapes = [(5, 3), (7,), (), (2, 3, 2), (40, 30)]
        self.more = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def policy(options=None):
    return {"version": 1, "name": "p", "default": "keep", "techniques": [{"stable_spam": options or {}}]}


adamw = partial(torch.optim.AdamW, **ADAM)
fused_adamw = partial(adamw, fused=True)


def prepared(make, options=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = applied(Several().to(dtype), policy(options))
    return model, fp4graph.prepare_optimizer(model, make(model.parameters()))


def gradients(steps, dtype=torch.float32):
    return spiky([p.shape for p in Several().parameters()], steps, dtype)


def both(make=fused_adamw, options=CONDITIONING, dtype=torch.float32):
    """Return a model under the technique with its optimizer, and the same model with StableSPAM."""
    model, optimizer = prepared(make, options, dtype)
    reference = Several().to(dtype)
    reference.load_state_dict(model.state_dict(), strict=False)
    return (model, optimizer), (reference, StableSPAM(reference.parameters(), **ADAM, **options))


def assert_close(model, other, **tolerances):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), **tolerances)


@pytest.mark.parametrize("changed", [{}, {"total_steps": None}, {"reset_interval": None}, {"reset_interval": 1}])
def test_fused_adamw_under_the_technique_equals_the_optimizer_to_the_bit(changed):
    (model, optimizer), (reference, spam) = both(options={**CONDITIONING, **changed})
    for grads in gradients(45):
        push(optimizer, model.parameters(), [grads])
        push(spam, reference.parameters(), [grads])
        assert same(model.parameters(), reference.parameters())
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        for name in ("max_avg", "norm_avg", "norm_avg_sq", "conditioned"):
            assert torch.equal(optimizer.state[p][f"fp4graph.stable_spam.{name}"], spam.state[q][name])


@pytest.mark.parametrize("foreach", [True, False])
def test_other_forms_of_adamw_differ_by_rounding(foreach):
    (model, optimizer), (reference, spam) = both(partial(adamw, foreach=foreach), dtype=torch.float64)
    push(optimizer, model.parameters(), gradients(45, torch.float64))
    push(spam, reference.parameters(), gradients(45, torch.float64))
    assert_close(model, reference, rtol=1e-10, atol=1e-12)


def test_gradients_are_conditioned_in_place_and_in_batches(monkeypatch):
    expected, whole = prepared(fused_adamw, CONDITIONING)
    stream = gradients(12)
    push(whole, expected.parameters(), stream)
    monkeypatch.setattr(conditioning, "CPU_BATCH", 100)
    model, batched = prepared(fused_adamw, CONDITIONING)
    push(batched, model.parameters(), stream[:-1])
    grads = [g.clone() for g in stream[-1]]
    for p, g in zip(model.parameters(), grads, strict=True):
        p.grad = g
    batched.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
    assert_close(model, expected)


def test_several_dtypes_and_empty_parameters():
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(8, 8), torch.randn(9).bfloat16(), torch.randn(0, 3), torch.randn(4).double()])
    model = applied(model, policy())
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters()))
    push(optimizer, model.parameters(), [[torch.randn_like(p) for p in model.parameters()] for _ in range(3)])
    dtypes = [optimizer.state[p].get("fp4graph.stable_spam.norm_avg") for p in model.parameters()]
    assert [None if x is None else x.dtype for x in dtypes] == [torch.float32, torch.float32, None, torch.float64]
    assert all(p.isfinite().all() for p in model.parameters())


class Subclass(torch.Tensor):
    """A subclass, as DTensor is."""


def test_gradients_of_a_subclass_of_tensor_are_conditioned_one_by_one():
    expected, reference = prepared(fused_adamw, CONDITIONING)
    model, optimizer = prepared(partial(adamw, foreach=False), CONDITIONING)
    push(reference, expected.parameters(), gradients(12))
    wrapped = [[None if g is None else g.as_subclass(Subclass) for g in grads] for grads in gradients(12)]
    push(optimizer, model.parameters(), wrapped)
    assert_close(model, expected, rtol=1e-5, atol=1e-6)


def test_gradients_are_conditioned_after_the_hooks_of_techniques_declared_before():
    techniques = [{"dampen": {"strength": 0.5}}, {"stable_spam": CONDITIONING}]
    data = one_rule(quantize=quantizer(16), default="keep", techniques=techniques)
    model = applied(nn.Linear(16, 4, bias=False), data)
    optimizer = fp4graph.prepare_optimizer(model, fused_adamw(model.parameters()))
    model(torch.randn(8, 16)).square().mean().backward()
    weight, grad = model.weight.detach().clone(), model.weight.grad.clone()
    optimizer.step()
    spec = fp4graph.QuantSpec(block=16, scale=fp4graph.ScaleSpec("e8m0", "ceil"))
    dampened = grad + (weight - fp4graph.fake_quantize(weight, spec))
    kept = optimizer.state[model.weight]["fp4graph.stable_spam.max_avg"].item()
    assert kept == pytest.approx(0.03 * dampened.abs().max().item(), rel=1e-5)
    assert fp4graph.load_policy(data).complexity == 1.0


TORCH = {name: partial(getattr(torch.optim, name), lr=0.01) for name in ("AdamW", "NAdam", "RAdam", "Adamax")} | {
    "Adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "fused": fused_adamw,
    "foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
}
TIMM = [
    "adamw", "adamwlegacy", "cadamw", "nadamw", "nadamlegacy", "radamlegacy", "lamb", "lambc", "adamp", "adabelief",
    "radabelief", "adan", "laprop", "mars",
    pytest.param("novograd", marks=pytest.mark.skipif(
        timm.__version__ < "1.0.31", reason="its step divides p.grad in place, and this test reads p.grad afterwards"
    )),
]  # fmt: skip


def optimizer_named(name, p):
    return TORCH[name](p) if name in TORCH else timm.optim.create_optimizer_v2(list(p), opt=name, lr=0.01)


@pytest.mark.parametrize("name", [*TORCH, *TIMM])
def test_after_a_reset_an_optimizer_steps_as_a_new_one(name):
    model, optimizer = prepared(partial(optimizer_named, name), {"reset_interval": 4})
    stream = [grads for grads in gradients(30) if all(g is not None for g in grads)]
    push(optimizer, model.parameters(), stream[:3])
    former = [p.detach().clone() for p in model.parameters()]
    fresh = nn.ParameterList([p.clone() for p in former])
    new = optimizer_named(name, fresh.parameters())
    for grads in stream[3:6]:
        push(optimizer, model.parameters(), [grads])
        push(new, fresh.parameters(), [[p.grad for p in model.parameters()]])  # conditioned already
        assert same(model.parameters(), fresh.parameters())
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), former, strict=True))


def test_resets_reach_parameters_without_a_gradient():
    model, optimizer = prepared(fused_adamw, {"reset_interval": 2})
    first, *others = model.parameters()
    push(optimizer, (first, *others), [[torch.ones_like(p) for p in model.parameters()]])
    first.grad = None
    optimizer.step()
    assert optimizer.state[first]["step"] == 0
    assert not optimizer.state[first]["exp_avg"].any()
    assert optimizer.state[others[0]]["step"] == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), "SGD .*has no betas"),
        (torch.optim.RMSprop, "RMSprop .*has no betas"),
        *((partial(optimizer_named, name.lower()), f"{name} .*{why}") for name, why in (
            ("Lion", "keeps exp_avg"), ("Muon", "momentum_buffer"), ("MADGRAD", "has no betas"),
            ("Adopt", "reset_interval: null"),
        )),
    ],
)  # fmt: skip
def test_optimizers_without_adams_moments_are_refused(make, message):
    model, optimizer = prepared(make)
    with pytest.raises(fp4graph.Error, match=f"needs an optimizer of Adam's kind; {message}.*Use torch.optim.AdamW"):
        push(optimizer, model.parameters(), gradients(1))


def test_stable_spam_itself_and_sparse_gradients_are_refused():
    model, optimizer = prepared(StableSPAM)
    with pytest.raises(fp4graph.Error, match=r"condition its gradients a second time; use torch\.optim\.AdamW"):
        push(optimizer, model.parameters(), gradients(1))
    model = applied(nn.Embedding(5, 3, sparse=True), policy())
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters()))
    nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()
    with pytest.raises(fp4graph.Error, match="sparse or complex"):
        optimizer.step()


def watched(options):
    """Return a model, its optimizer, and a list to which each step appends the momenta that it uses."""
    (model, optimizer), seen = prepared(fused_adamw, options), []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(o.param_groups[0]["betas"]))
    return model, optimizer, seen


def test_every_step_restores_the_users_momenta():
    model, optimizer, seen = watched({"total_steps": 3, "eta_min": 0.5})
    for grads in gradients(6):
        push(optimizer, model.parameters(), [grads])
        assert optimizer.param_groups[0]["betas"] == (0.85, 0.99)
    assert [beta2 for _, beta2 in seen] == [0.99] * 6
    half = 0.5 + 0.5 * (1 + 2**-0.5) / 2
    expected = [half, 0.75, 1.5 - half, 0.5, 0.5, 0.5]
    assert [beta1 / 0.85 for beta1, _ in seen] == pytest.approx(expected)


def test_a_step_that_raises_leaves_no_scheduled_momenta():
    model, optimizer, seen = watched({"total_steps": 3})
    push(optimizer, model.parameters(), gradients(1))
    interrupted = optimizer.register_step_pre_hook(lambda o, args, kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        push(optimizer, model.parameters(), gradients(1))
    interrupted.remove()
    push(optimizer, model.parameters(), gradients(1))
    assert seen[2][0] == pytest.approx(0.85 * (1.5 - (0.5 + 0.5 * (1 + 2**-0.5) / 2)))
    assert optimizer.param_groups[0]["betas"] == (0.85, 0.99)


def test_a_scheduler_of_momenta_sees_the_users_momenta():
    model, optimizer = prepared(lambda p: torch.optim.AdamW(p, lr=0.01), {"total_steps": 10})
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
    plain = torch.optim.AdamW(Several().parameters(), lr=0.01)
    reference = torch.optim.lr_scheduler.OneCycleLR(plain, 0.01, total_steps=10)
    for grads in gradients(8):
        push(optimizer, model.parameters(), [grads])
        plain.step()
        scheduler.step()
        reference.step()
        assert optimizer.param_groups[0]["betas"] == plain.param_groups[0]["betas"]


def test_a_group_added_later_joins_the_schedule():
    model, optimizer = prepared(fused_adamw, CONDITIONING)
    push(optimizer, model.parameters(), gradients(3))
    late = nn.Parameter(torch.randn(4))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.randn(4)
    optimizer.step()
    assert [group["fp4graph.stable_spam.step"] for group in optimizer.param_groups] == [4, 4]
    assert optimizer.state[late]["fp4graph.stable_spam.conditioned"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fused", "AdamW", "lamb", "adan"])
def test_a_resumed_run_equals_the_whole_run(dtype, name):
    make = partial(optimizer_named, name)
    assert_resumes(lambda: prepared(make, CONDITIONING, dtype), gradients(40, dtype), at=17)


@pytest.mark.slow
def test_a_distributed_checkpoint_resumes_too():
    model, optimizer = prepared(fused_adamw, CONDITIONING)
    stream = gradients(20)
    push(optimizer, model.parameters(), stream[:9])
    state, weights = copy.deepcopy((get_optimizer_state_dict(model, optimizer), model.state_dict()))
    other, resumed = prepared(fused_adamw, CONDITIONING)
    set_optimizer_state_dict(other, resumed, state)
    other.load_state_dict(weights)
    push(optimizer, model.parameters(), stream[9:])
    push(resumed, other.parameters(), stream[9:])
    assert same(model.parameters(), other.parameters())


def test_the_defaults_are_those_of_the_optimizer():
    (technique,) = fp4graph.load_policy(policy()).techniques
    (group,) = StableSPAM([nn.Parameter(torch.ones(1))]).param_groups
    assert technique.model_dump() == {name: group[name] for name in technique.model_dump()}
