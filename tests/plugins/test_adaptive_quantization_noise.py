"""adaptive_quantization_noise against its equation: Q(W) + z, or Q(W)·(1 + z), and σ by its schedule."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
import yaml
from torch import nn
from torch._functorch import config as aot
from torch._inductor.utils import run_and_get_code

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.graph.functions import site_function
from fp4graph.graph.plan import plan_site
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView
from tests.helpers.policies import loaded, one_rule

NEAREST = fp4graph.QuantSpec(block=32, scale=fp4graph.ScaleSpec("e8m0", "ceil"))
SCHEDULE = {"sigma_start": 0.05, "sigma_end": 0.0005, "stages": 5, "steps_per_stage": 10}
KEY = noise.make_key("site", "fc")


policy = partial(loaded, "adaptive_quantization_noise")


def draw(count=0, site="fc"):
    return Draw(noise.make_key("site", site), noise.make_step(0, 0, count))


def program(options=SCHEDULE, training=True, **more):
    return plan_site(SiteView("fc", "linear", 96, 64, 96 * 64), policy(options, **more).rules[0], training=training)


def weight(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def noisy(w, count=0, options=SCHEDULE, operand=Operand.FPROP_WEIGHT, site="fc", **more):
    (term,) = program(options, **more).program.operand(operand)(w, draw(count, site))
    return term.product()


def test_one_value_per_input_channel_is_added():
    """Exactly: in float64, Q(W) + z with z read off a weight of zeros."""
    w = weight(64, 96)
    z = noisy(torch.zeros(1, 96))
    assert z.unique().numel() == 96
    q = fp4graph.fake_quantize(w, NEAREST)
    assert torch.equal(noisy(w), (q.double() + z.double()).float())


def test_multiplicative_noise_is_that_of_the_norms_weight():
    """Scaling channel k of X by 1 + z_k is scaling column k of W."""
    options = {**SCHEDULE, "kind": "multiplicative"}
    w, x = weight(64, 96), weight(8, 96, seed=1).double()
    z = noisy(torch.zeros(1, 96)).double()  # the additive form draws the same
    q = fp4graph.fake_quantize(w, NEAREST)
    w_hat = noisy(w, options=options)
    factor = (1 + z).float()
    assert torch.equal(w_hat, (q.double() * factor.double()).float())
    torch.testing.assert_close(x @ w_hat.double().mT, (x * (1 + z)) @ q.double().mT, rtol=1e-6, atol=1e-6)
    assert torch.equal(w_hat == 0, q == 0)


@pytest.mark.parametrize("options", [SCHEDULE, {**SCHEDULE, "stages": 2}, {**SCHEDULE, "sigma_end": 0.05}])
def test_sigma_decays_exponentially_over_the_stages(options):
    """The variates do not depend on σ, so two schedules differ by the ratio of their σ alone."""
    constant = {**options, "sigma_start": 1.0, "sigma_end": 1.0}
    zero, last = torch.zeros(1, 96), options["stages"] - 1
    for count in (0, 9, 10, 19, 20, 39, 40, 49, 50, 10**6):
        stage = min(count // 10, last)
        sigma = math.exp(
            math.log(options["sigma_start"])
            + stage / last * (math.log(options["sigma_end"]) - math.log(options["sigma_start"]))
        )
        unit = noisy(zero, count, constant)
        torch.testing.assert_close(noisy(zero, count, options), unit * sigma, rtol=1e-6, atol=0)


def test_the_noise_has_mean_zero_and_the_stages_sigma():
    z = noisy(torch.zeros(1, 1 << 16), 20)
    sigma = 0.05 * 0.01 ** (2 / 4)
    assert abs(z.mean()) < 5 * sigma / 2**8
    assert abs(z.std() / sigma - 1) < 5 / math.sqrt(2 * 2**16)


def test_it_is_drawn_anew_at_every_forward_and_site_and_repeats():
    zero = torch.zeros(4, 96)
    first = noisy(zero)
    assert (first == first[0]).all()
    assert torch.equal(noisy(zero), first)
    for other in (noisy(zero, 1), noisy(zero, site="fc2")):
        assert (other != first).all()
        assert abs(torch.corrcoef(torch.stack([other[0], first[0]]))[0, 1]) < 5 / math.sqrt(96)


def test_other_operands_and_evaluation_are_left_alone():
    w = weight(64, 96)
    q = fp4graph.fake_quantize(w, NEAREST)
    for operand in Operand:
        assert torch.equal(noisy(w, operand=operand), q) == (operand is not Operand.FPROP_WEIGHT)
    assert torch.equal(noisy(w, training=False), q)
    with pytest.warns(PolicyWarning, match="no effect"):
        products = policy(SCHEDULE, op="matmul")
    plan = plan_site(SiteView("qk", "matmul", 64, 64, None), products.rules[0])
    assert plan.program.fprop.right.parts == ()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_rollouts_have_noise_where_a_policy_asks_for_it(backend):
    """In evaluation mode: one draw between two training forwards, that of the next; none by default."""
    x = torch.eye(96)[:8]
    outputs = {}
    for rollout in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(96, 64, bias=False)
        options = {**SCHEDULE, "rollout": rollout}
        keep = {"fprop.input": "keep", "backward": "keep"}
        model = fp4graph.apply(model, policy(options, operands=keep), backend=backend, seed=1)
        weight = model.weight.detach().clone()
        seen = []
        for _ in range(2):
            model.eval()
            with torch.no_grad():
                seen += [model(x), model(x)]
            seen.append(model.train()(x).detach())
        outputs[rollout] = [y - fp4graph.fake_quantize(weight, NEAREST).T[:8] for y in seen]
    first, again, trained, second, _, trained_again = outputs[True]
    assert torch.equal(first, again)
    for rolled, next_trained in ((first, trained), (second, trained_again)):
        torch.testing.assert_close(rolled, next_trained, rtol=0, atol=1e-6)
    assert 0.01 < first.std() < 0.1
    assert (first - second).abs().max() > 0.01
    first, _, trained, *_ = outputs[False]
    assert first.abs().max() < 1e-6
    torch.testing.assert_close(trained, outputs[True][2], rtol=0, atol=0)


def test_bf16_is_rounded_once_and_poison_and_empty_tensors_pass():
    w = weight(64, 96).bfloat16()
    assert torch.equal(noisy(w), noisy(w.float()).bfloat16())
    w = weight(4, 96)
    w[1, 40] = math.nan
    assert noisy(w).isnan().nonzero().tolist() == [[1, k] for k in range(32, 64)]
    assert noisy(w[:0]).shape == (0, 96)
    assert noisy(w[:, :0]).shape == (4, 0)


def test_the_noise_is_not_scaled_with_a_tensor():
    """γ is part of Q(W): it is multiplied in before the noise, and not after the GEMM."""
    w, scaling = weight(64, 96), {"tensor_scaling": {"target": 64}}
    z = noisy(torch.zeros(1, 96)).double()
    gamma = (w.abs().max() / torch.tensor(6.0 * 64)).item()
    q = fp4graph.fake_quantize((w / gamma), NEAREST).double() * gamma
    torch.testing.assert_close(noisy(w, after=[scaling]).double(), q + z, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("additive", marks=pytest.mark.long), "multiplicative"])
def test_eager_and_inductor_agree(kind, inductor):
    operand = program({**SCHEDULE, "kind": kind}).program.operand(Operand.FPROP_WEIGHT)

    def f(w, step):
        return operand(w, Draw(KEY, step))[0].values

    compiled = inductor(f, weight(64, 80), noise.make_step(0, 0, 3))
    for count in (3, 14, 200):
        step = noise.make_step(0, 0, count)
        for w in (weight(64, 80), weight(24, 70, seed=1)):
            assert torch.equal(f(w, step), compiled(w, step))


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.process
@pytest.mark.compiler
def test_inductor_makes_little_more_code_than_without_the_noise():
    """Twice the compile time would be too much, and seconds depend on the machine: bytes of source are counted.

    Inlined into the loop over a weight, the hashes made four times the source, and took thirty times as long.
    """

    def compiled(*techniques):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 96), nn.GELU())
        model = fp4graph.apply(model, one_rule(*techniques), backend="inductor", seed=1)
        uncached = torch._inductor.config.patch(fx_graph_cache=False), aot.patch(enable_autograd_cache=False)
        with uncached[0], uncached[1]:
            _, code = run_and_get_code(lambda: model(weight(8, 96)).sum().backward())
        return "".join(code)

    plain, noisy = compiled(), compiled({"adaptive_quantization_noise": SCHEDULE})
    kernels = [re.findall(r"async_compile\.cpp_pybinding\(.*?\'\'\'\)", code, re.DOTALL) for code in (plain, noisy)]
    assert len(kernels[1]) <= len(kernels[0]) + 2  # an addition for each shape of weight
    assert len("".join(kernels[1])) < 2 * len("".join(kernels[0]))
    assert noisy.count("fp4graph.gaussian.default(") == 2


def test_gradients_go_straight_through():
    """dX is dY·Ŵ of the forward where dgrad reads that, dW is dYᵀ·X."""
    x, w, dy = weight(40, 96, seed=1).requires_grad_(), weight(64, 96).requires_grad_(), weight(40, 64, seed=2)
    operands = {"fprop.input": "keep", "wgrad": "keep", "dgrad.grad_output": "keep", "dgrad.weight": "fprop"}
    f = site_function(program(operands=operands).program, "linear", 1.0, 1.0)
    y = f(x, w, None, KEY, noise.make_step(0, 0, 0), 0)
    y.backward(dy)
    torch.testing.assert_close(w.grad, dy.mT @ x.detach())
    q = fp4graph.fake_quantize(w.detach(), NEAREST)
    noise_of_y = y.detach() - x.detach() @ q.mT  # X·z, the same for every output
    torch.testing.assert_close(noise_of_y, noise_of_y[:, :1].expand_as(noise_of_y), rtol=0, atol=1e-4)
    noise_of_dx = x.grad - dy @ q  # (Σ_n dY)·zᵀ
    z = noise_of_dx / dy.sum(1, keepdim=True)
    torch.testing.assert_close(x.detach() @ z[0], noise_of_y[:, 0], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_model_is_noisy_in_training_and_not_in_evaluation():
    torch.manual_seed(0)
    model = fp4graph.apply(nn.Linear(64, 32), policy(SCHEDULE), backend="eager")
    x = weight(8, 64)
    train = [model(x).detach() for _ in range(2)]
    assert not torch.equal(*train)
    model.eval()
    calm = [model(x).detach() for _ in range(2)]
    assert torch.equal(*calm)
    q = [fp4graph.fake_quantize(t.detach(), NEAREST) for t in (x, model.weight)]
    torch.testing.assert_close(calm[0], q[0] @ q[1].mT + model.bias.detach())


def test_the_policy_writes_its_options_down():
    loaded = policy(SCHEDULE)
    assert loaded.complexity == 0.5
    written = yaml.safe_load(loaded.to_yaml())
    assert written["rules"][0]["techniques"] == [{"adaptive_quantization_noise": SCHEDULE}]
    assert fp4graph.load_policy(written) == loaded
