"""loss_scaling: torch's GradScaler with the options of the policy, and the state that a skipped step keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.training import checkpoint
from tests.helpers import training
from tests.helpers.policies import TIES_UP, one_rule
from tests.plugins.layer import gaussian

PLAIN = one_rule(quantize=TIES_UP)


def policy(options=None, *, more=()):
    return {**PLAIN, "techniques": [*more, {"loss_scaling": options or {}}]}


def prepared(data, make=torch.optim.AdamW, **options):
    """Return a linear layer under the policy, its optimizer and its scaler."""
    torch.manual_seed(0)
    model = training.applied(nn.Linear(64, 8), data)
    return model, training.prepared(model, make, **options), fp4graph.grad_scaler(model)


def step(model, optimizer, scaler, factor=1.0, *, unscale=False, half=False):
    """Take one training step; ``factor`` multiplies the loss, ``half`` runs the model in fp16."""
    with torch.autocast("cpu", torch.float16, enabled=half):
        y = model(gaussian(16, 64, seed=2))
        assert y.dtype is (torch.float16 if half else torch.float32)
    scaler.scale(y.square().mean() * factor).backward()
    if unscale:
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def test_the_policy_turns_torchs_scaler_on():
    options = {"init_scale": 128.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 7}
    _, _, scaler = prepared(policy(options))
    assert type(scaler) is torch.amp.GradScaler
    assert scaler.get_scale() == 128.0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
    assert fp4graph.load_policy(policy()).complexity == 0.5


@pytest.mark.parametrize(
    "data", [policy(), {"version": 1, "name": "p", "default": "keep", "techniques": ["loss_scaling"]}]
)
def test_the_defaults_are_torchs_also_where_nothing_is_quantized(data):
    _, _, scaler = prepared(data)
    assert scaler.state_dict() == torch.amp.GradScaler("cpu").state_dict()


@pytest.mark.slow
def test_without_the_technique_the_scaler_is_disabled():
    model, optimizer, scaler = prepared(PLAIN)
    assert not scaler.is_enabled()
    step(model, optimizer, scaler)
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("half", [False, True])
def test_the_scale_grows_and_backs_off(half):
    model, optimizer, scaler = prepared(policy({"init_scale": 4.0, "growth_interval": 3}), torch.optim.SGD, lr=0.1)
    scales = []
    for factor in (1, 1, 1, 1, float("inf"), 1, 1, 1):
        step(model, optimizer, scaler, factor, half=half)
        scales.append(scaler.get_scale())
    assert scales == [4.0, 4.0, 8.0, 8.0, 4.0, 4.0, 4.0, 8.0]


def test_the_scale_backs_off_until_gradients_fit_fp16():
    model, optimizer, scaler = prepared(policy({"init_scale": 2.0**24}), torch.optim.SGD, lr=1e-3)
    before, skipped = model.weight.detach().clone(), 0
    for _ in range(20):
        step(model, optimizer, scaler, half=True)
        skipped += torch.equal(model.weight, before)
    assert 0 < skipped < 15
    assert scaler.get_scale() == 2.0 ** (24 - skipped)
    assert model.weight.isfinite().all()


def test_a_scale_of_a_power_of_two_changes_no_bit_of_fp32_training():
    """E8M0 scales have the exponents of fp32, so every quantizer commutes with a power of two."""
    plain, scaled = prepared(PLAIN), prepared(policy({"init_scale": 1024.0}))
    for _ in range(3):
        step(*plain)
        step(*scaled)
    assert torch.equal(plain[0].weight, scaled[0].weight)


@pytest.mark.parametrize(
    ("fused", "unscale"), [(False, False), (False, True), (True, True)], ids=["plain", "unscaled", "fused"]
)
def test_techniques_skip_a_skipped_step_too(fused, unscale):
    """Their hooks do not run, and their state does not change."""
    techniques = [{"dampen": {"total_steps": 10}}, "freeze", "q_ema", "stable_spam"]
    model, optimizer, scaler = prepared(policy(more=techniques), betas=(0.8, 0.9), fused=fused)
    step(model, optimizer, scaler, unscale=unscale)

    def everything():
        kept = {name: value.clone() for name, value in optimizer.state[model.weight].items()}
        return kept | {"weight": model.weight.clone(), "average": model._fp4graph_q_ema_weight.clone()}

    before = everything()
    assert before["fp4graph.dampen.steps"] == 1
    step(model, optimizer, scaler, float("inf"), unscale=unscale)
    after = everything()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert optimizer.param_groups[0]["fp4graph.stable_spam.step"] == 1
    step(model, optimizer, scaler, unscale=unscale)
    assert optimizer.state[model.weight]["fp4graph.dampen.steps"] == 2


def test_a_fused_optimizer_needs_unscaled_gradients_before_its_step():
    """It would unscale them inside the step, after the hooks of techniques."""
    model, optimizer, scaler = prepared(policy(more=["dampen"]), fused=True)
    with pytest.raises(fp4graph.Error, match=r"call scaler\.unscale_\(optimizer\)"):
        step(model, optimizer, scaler)


@pytest.mark.slow
def test_a_resumed_run_equals_the_whole_run(tmp_path):
    data = policy({"init_scale": 4.0, "growth_interval": 2}, more=["q_ema"])
    factors = [1, 1, 1, float("inf"), 1, 1, 1]
    model, optimizer, scaler = prepared(data)
    for factor in factors[:3]:
        step(model, optimizer, scaler, factor)
    checkpoint.save(tmp_path / "run.pt", model, optimizer, scaler=scaler)
    other, resumed, resumed_scaler = prepared(data)
    checkpoint.load(tmp_path / "run.pt", other, resumed, scaler=resumed_scaler)
    assert resumed_scaler.state_dict() == scaler.state_dict()
    for factor in factors[3:]:
        step(model, optimizer, scaler, factor)
        step(other, resumed, resumed_scaler, factor)
    assert resumed_scaler.state_dict() == scaler.state_dict()
    assert resumed_scaler.get_scale() == 8.0
    assert torch.equal(model.weight, other.weight)


def test_scaling_that_a_later_phase_declares_is_enabled_from_the_beginning() -> None:
    policy = {**PLAIN, "phases": [{"at": 10, "techniques": [{"loss_scaling": {"init_scale": 8.0}}]}]}
    scaler = fp4graph.grad_scaler(training.applied(nn.Linear(32, 32), policy))
    assert scaler.is_enabled()
    assert scaler.get_scale() == 8.0
