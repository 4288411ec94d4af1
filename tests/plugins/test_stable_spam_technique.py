"""stable_spam around other optimizers against fp4graph.optim.StableSPAM, which has tests against the equations."""

from __future__ import annotations

import copy
import io

import pytest
import timm.optim
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import fp4graph
from fp4graph.optim import StableSPAM
from fp4graph.training import conditioning

CONDITIONING = {
    "gamma1": 0.6, "gamma2": 0.8, "theta": 0.97, "total_steps": 31, "eta_min": 0.3, "reset_interval": 10,
}  # fmt: skip
ADAM = {"lr": 0.02, "betas": (0.85, 0.99), "weight_decay": 0.1}


class Several(nn.Module):
    """A linear that nothing uses, so that only the gradients given here count, and parameters of all shapes."""

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


def prepared(make, options=None, dtype=torch.float32):
    torch.manual_seed(0)
    model = fp4graph.apply(Several().to(dtype), policy(options), backend="eager")
    return model, fp4graph.prepare_optimizer(model, make(model.parameters()))


def gradients(steps, model):
    """Of lengths that change, with spikes, with a zero one and a missing one now and then."""
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        grads = []
        for i, p in enumerate(model.parameters()):
            g = torch.randn(p.shape, generator=generator) * torch.randn((), generator=generator).exp()
            if step % 7 == 3:
                g.view(-1)[0] *= 50
            if (step + i) % 13 == 5:
                g.zero_()
            grads.append(None if (step, i) in {(0, 1), (9, 0), (20, 3)} else g.to(p.dtype))
        yield grads


def drive(model, optimizer, stream):
    for grads in stream:
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = None if g is None else g.clone()
        optimizer.step()


def alike(model, other):
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def fused_adamw(p):
    return torch.optim.AdamW(p, **ADAM, fused=True)


# ---------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("changed", [{}, {"total_steps": None}, {"reset_interval": None}, {"reset_interval": 1}])
def test_fused_adamw_under_it_is_stable_spam_to_the_bit(changed):
    options = {**CONDITIONING, **changed}
    model, optimizer = prepared(fused_adamw, options)
    reference = Several()
    reference.load_state_dict({n: p for n, p in model.state_dict().items() if isinstance(p, torch.Tensor)})
    spam = StableSPAM(reference.parameters(), **ADAM, **options)
    for grads in gradients(45, model):
        drive(model, optimizer, [grads])
        drive(reference, spam, [grads])
        assert alike(model, reference)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        for name in ("max_avg", "norm_avg", "norm_avg_sq", "conditioned"):
            assert torch.equal(optimizer.state[p][f"fp4graph.stable_spam.{name}"], spam.state[q][name])


def test_a_weight_that_is_used_twice_is_conditioned_once(sharing):
    torch.manual_seed(0)
    model = fp4graph.apply(sharing(nn.Linear(16, 4)), policy(CONDITIONING), backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, fused_adamw(model.parameters()))
    reference = nn.ParameterList([p.detach().clone() for p in model.parameters()])
    spam = StableSPAM(reference.parameters(), **ADAM, **CONDITIONING)
    for grads in gradients(45, model):
        drive(model, optimizer, [grads])
        drive(reference, spam, [grads])
        assert alike(model, reference)


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}])
def test_other_adamws_differ_by_rounding(how):
    model, optimizer = prepared(lambda p: torch.optim.AdamW(p, **ADAM, **how), CONDITIONING, torch.float64)
    reference = Several().double()
    reference.load_state_dict({n: p for n, p in model.state_dict().items() if isinstance(p, torch.Tensor)})
    spam = StableSPAM(reference.parameters(), **ADAM, **CONDITIONING)
    stream = list(gradients(45, model))
    drive(model, optimizer, stream)
    drive(reference, spam, stream)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-10, atol=1e-12)


def test_it_is_not_plain_adamw():
    model, optimizer = prepared(fused_adamw, CONDITIONING)
    plain = Several()
    stream = list(gradients(5, model))
    drive(plain, fused_adamw(plain.parameters()), stream)
    drive(model, optimizer, stream)
    assert not alike(model, plain)


def test_gradients_are_conditioned_in_place_and_in_batches(monkeypatch):
    expected, optimizer = prepared(fused_adamw, CONDITIONING)
    stream = list(gradients(12, expected))
    drive(expected, optimizer, stream)
    monkeypatch.setattr(conditioning, "CPU_BATCH", 100)
    model, its = prepared(fused_adamw, CONDITIONING)
    drive(model, its, stream[:-1])
    for p, g in zip(model.parameters(), stream[-1], strict=True):
        p.grad = g.clone()
    grads = [p.grad for p in model.parameters()]
    its.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), grads, strict=True))
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)
        torch.testing.assert_close(p, q)


def test_several_dtypes_and_empty_parameters():
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(8, 8), torch.randn(9).bfloat16(), torch.randn(0, 3), torch.randn(4).double()])
    model = fp4graph.apply(model, policy(), backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    dtypes = [optimizer.state[p].get("fp4graph.stable_spam.norm_avg") for p in model.parameters()]
    assert [None if x is None else x.dtype for x in dtypes] == [torch.float32, torch.float32, None, torch.float64]
    assert all(p.isfinite().all() for p in model.parameters())


class Subclass(torch.Tensor):
    """As DTensor is: no plain tensor, so one by one."""


def test_other_tensors_go_one_by_one():
    expected, optimizer = prepared(fused_adamw, CONDITIONING)
    model, its = prepared(lambda p: torch.optim.AdamW(p, **ADAM, foreach=False), CONDITIONING)
    for grads in gradients(12, expected):
        drive(expected, optimizer, [grads])
        for p, g in zip(model.parameters(), grads, strict=True):
            p.grad = None if g is None else g.clone().as_subclass(Subclass)
        its.step()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)


def test_it_acts_beside_a_quantizing_rule_and_after_what_is_declared_before_it():
    data = policy(CONDITIONING)
    data |= {
        "rules": [
            {"match": {"op": "linear"}, "quantize": {"element": "e2m1", "block": 16, "scale": {"format": "e8m0"}}}
        ],
        "techniques": [{"dampen": {"strength": 0.5}}, *data["techniques"]],
    }
    torch.manual_seed(0)
    model = fp4graph.apply(nn.Linear(16, 4, bias=False), data, backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, fused_adamw(model.parameters()))
    weight = model.weight.detach().clone()
    model(torch.randn(8, 16)).square().mean().backward()
    grad = model.weight.grad.clone()
    optimizer.step()
    spec = fp4graph.QuantSpec(block=16, scale=fp4graph.ScaleSpec("e8m0"))
    dampened = grad + (weight - fp4graph.fake_quantize(weight, spec))
    kept = optimizer.state[model.weight]["fp4graph.stable_spam.max_avg"].item()
    assert kept == pytest.approx(0.03 * dampened.abs().max().item(), rel=1e-5)
    assert fp4graph.load_policy(data).complexity == 1.0


# ---------------------------------------------------------------------- around any optimizer of Adam's kind

TORCH = {
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused": fused_adamw,
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}
TIMM = [
    "adamw",
    "adamwlegacy",
    "cadamw",
    "nadamw",
    "nadamlegacy",
    "radamlegacy",
    "lamb",
    "lambc",
    "adamp",
    "adabelief",
    "radabelief",
    "adan",
    "laprop",
    "mars",
    pytest.param(
        "novograd",
        marks=pytest.mark.skipif(
            timm.__version__ < "1.0.31", reason="its step divides p.grad in place, which this test feeds to the other"
        ),
    ),
]


def optimizer_named(name, p):
    return TORCH[name](p) if name in TORCH else timm.optim.create_optimizer_v2(list(p), opt=name, lr=0.01)


@pytest.mark.parametrize("name", [*TORCH, *TIMM])
def test_after_a_reset_the_optimizer_is_as_new(name):
    options = {"reset_interval": 4}
    model, optimizer = prepared(lambda p: optimizer_named(name, p), options)
    stream = [grads for grads in gradients(30, model) if all(g is not None for g in grads)]
    drive(model, optimizer, stream[:3])
    former = [p.detach().clone() for p in model.parameters()]
    fresh = nn.ParameterList([p.clone() for p in former])
    its = optimizer_named(name, fresh.parameters())
    for grads in stream[3:6]:
        drive(model, optimizer, [grads])
        drive(fresh, its, [[p.grad for p in model.parameters()]])  # conditioned already
        assert alike(model, fresh)
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), former, strict=True))


def test_resets_reach_parameters_without_a_gradient():
    model, optimizer = prepared(fused_adamw, {"reset_interval": 2})
    first, *others = model.parameters()
    for p in (first, *others):
        p.grad = torch.ones_like(p)
    optimizer.step()
    first.grad = None
    optimizer.step()
    assert optimizer.state[first]["step"] == 0
    assert not optimizer.state[first]["exp_avg"].any()
    assert optimizer.state[others[0]]["step"] == 1


@pytest.mark.parametrize(
    ("make", "name", "what"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "SGD", "has no betas"),
        (lambda p: torch.optim.RMSprop(p), "RMSprop", "has no betas"),
        (lambda p: timm.optim.create_optimizer_v2(list(p), opt="lion"), "Lion", "keeps exp_avg"),
        (lambda p: timm.optim.create_optimizer_v2(list(p), opt="muon"), "Muon", "momentum_buffer"),
        (lambda p: timm.optim.create_optimizer_v2(list(p), opt="madgrad"), "MADGRAD", "has no betas"),
        (lambda p: timm.optim.create_optimizer_v2(list(p), opt="adopt"), "Adopt", "reset_interval: null"),
    ],
    ids=["sgd", "rmsprop", "lion", "muon", "madgrad", "adopt"],
)
def test_optimizers_without_adams_moments_are_refused(make, name, what):
    model, optimizer = prepared(make)
    with pytest.raises(fp4graph.Error, match=rf"with momenta betas .*; {name} .*{what}.*Use torch.optim.AdamW"):
        drive(model, optimizer, gradients(1, model))


def test_stable_spam_itself_is_refused():
    model, optimizer = prepared(StableSPAM)
    with pytest.raises(fp4graph.Error, match=r"condition its gradients a second time; use torch\.optim\.AdamW"):
        drive(model, optimizer, gradients(1, model))


def test_sparse_gradients_are_refused():
    model = fp4graph.apply(nn.Embedding(5, 3, sparse=True), policy(), backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters()))
    nn.functional.embedding(torch.tensor([1]), model.weight, sparse=True).sum().backward()
    with pytest.raises(fp4graph.Error, match="sparse or complex"):
        optimizer.step()


# ---------------------------------------------------------------------- momenta


def test_the_users_momenta_come_back():
    model, optimizer = prepared(fused_adamw, {"total_steps": 3, "eta_min": 0.5})
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(o.param_groups[0]["betas"]))
    for grads in gradients(6, model):
        drive(model, optimizer, [grads])
        assert optimizer.param_groups[0]["betas"] == (0.85, 0.99)
    assert [beta2 for _, beta2 in seen] == [0.99] * 6
    half = 0.5 + 0.5 * (1 + 2**-0.5) / 2
    expected = [half, 0.75, 1.5 - half, 0.5, 0.5, 0.5]
    assert [beta1 / 0.85 for beta1, _ in seen] == pytest.approx(expected)


def test_a_step_that_raises_does_not_keep_them(monkeypatch):
    model, optimizer = prepared(fused_adamw, {"total_steps": 3})
    seen = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(o.param_groups[0]["betas"][0]))
    drive(model, optimizer, gradients(1, model))
    interrupted = optimizer.register_step_pre_hook(lambda o, args, kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        drive(model, optimizer, gradients(1, model))
    interrupted.remove()
    drive(model, optimizer, gradients(1, model))
    assert seen[2] == pytest.approx(0.85 * (1.5 - (0.5 + 0.5 * (1 + 2**-0.5) / 2)))
    assert optimizer.param_groups[0]["betas"] == (0.85, 0.99)


def test_a_schedule_of_momenta_goes_on():
    model, optimizer = prepared(lambda p: torch.optim.AdamW(p, lr=0.01), {"total_steps": 10})
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10)
    plain = torch.optim.AdamW(Several().parameters(), lr=0.01)
    its = torch.optim.lr_scheduler.OneCycleLR(plain, 0.01, total_steps=10)
    for grads in gradients(8, model):
        drive(model, optimizer, [grads])
        plain.step()
        scheduler.step()
        its.step()
        assert optimizer.param_groups[0]["betas"] == plain.param_groups[0]["betas"]


def test_a_group_added_later_joins_the_schedule():
    model, optimizer = prepared(fused_adamw, CONDITIONING)
    drive(model, optimizer, gradients(3, model))
    late = nn.Parameter(torch.randn(4))
    optimizer.add_param_group({"params": [late]})
    late.grad = torch.randn(4)
    optimizer.step()
    assert [group["fp4graph.stable_spam.step"] for group in optimizer.param_groups] == [4, 4]
    assert optimizer.state[late]["fp4graph.stable_spam.conditioned"] == 1


# ---------------------------------------------------------------------- resuming


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fused", "AdamW", "lamb", "adan"])
def test_a_resumed_run_is_the_run(dtype, name):
    model, optimizer = prepared(lambda p: optimizer_named(name, p), CONDITIONING, dtype)
    stream = list(gradients(40, model))
    drive(model, optimizer, stream[:17])
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other, its = prepared(lambda p: optimizer_named(name, p), CONDITIONING, dtype)
    other.load_state_dict(weights)
    its.load_state_dict(state)
    for grads in stream[17:]:
        drive(model, optimizer, [grads])
        drive(other, its, [grads])
        assert alike(model, other)


def test_a_distributed_checkpoint_resumes_too():
    model, optimizer = prepared(fused_adamw, CONDITIONING)
    stream = list(gradients(20, model))
    drive(model, optimizer, stream[:9])
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    weights = copy.deepcopy([p.detach() for p in model.parameters()])
    other, its = prepared(fused_adamw, CONDITIONING)
    set_optimizer_state_dict(other, its, state)
    with torch.no_grad():
        for p, w in zip(other.parameters(), weights, strict=True):
            p.copy_(w)
    drive(model, optimizer, stream[9:])
    drive(other, its, stream[9:])
    assert alike(model, other)


# ---------------------------------------------------------------------- options


def test_the_defaults_are_those_of_the_optimizer():
    (technique,) = fp4graph.load_policy(policy()).techniques
    (group,) = StableSPAM([nn.Parameter(torch.ones(1))]).param_groups
    assert technique.model_dump() == {name: group[name] for name in technique.model_dump()}
