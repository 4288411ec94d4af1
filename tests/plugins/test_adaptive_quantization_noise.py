"""adaptive_quantization_noise against its equations: Q(W) + z, Q(W)·(1 + z), and the schedule of σ."""

from __future__ import annotations

import math
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch._functorch import config as aot
from torch._inductor.utils import run_and_get_code

import fp4graph
from fp4graph.errors import PolicyWarning
from fp4graph.graph.plan import plan_site
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand
from tests.helpers.policies import loaded, one_rule
from tests.helpers.sites import program_of
from tests.plugins.layer import DRAW, KEY, SCHEDULE, SPEC, Layer, draw, gaussian

policy = partial(loaded, "adaptive_quantization_noise")
layer = Layer(lambda options=None, **more: policy(SCHEDULE if options is None else options, **more), 96, 64)


def noisy(w, count=0, options=SCHEDULE, operand=Operand.FPROP_WEIGHT, key=KEY, **more):
    return layer.quantized(w, options, operand, draw=Draw(key, draw(count).step), **more)


def test_one_value_per_input_channel_is_added():
    """The sum Q(W) + z is exact, as in float64; a weight of zeros shows z."""
    w = gaussian(64, 96)
    z = noisy(torch.zeros(1, 96))
    assert z.unique().numel() == 96
    q = fp4graph.fake_quantize(w, SPEC)
    assert torch.equal(noisy(w), (q.double() + z.double()).float())


def test_multiplicative_noise_on_the_weight_equals_noise_on_channels_of_the_input():
    """Scaling channel k of X by 1 + z_k equals scaling column k of W."""
    w, x = gaussian(64, 96), gaussian(8, 96, seed=1).double()
    z = noisy(torch.zeros(1, 96)).double()  # the additive form draws the same z
    q = fp4graph.fake_quantize(w, SPEC)
    w_hat = noisy(w, options={**SCHEDULE, "kind": "multiplicative"})
    assert torch.equal(w_hat, (q.double() * (1 + z).float().double()).float())
    torch.testing.assert_close(x @ w_hat.double().mT, (x * (1 + z)) @ q.double().mT, rtol=1e-6, atol=1e-6)
    assert torch.equal(w_hat == 0, q == 0)


@pytest.mark.parametrize("options", [SCHEDULE, {**SCHEDULE, "stages": 2}, {**SCHEDULE, "sigma_end": 0.05}])
def test_sigma_decays_exponentially_over_the_stages(options):
    """The normal variates do not depend on σ, so the noise of two schedules differs only by the ratio of their σ."""
    constant = {**options, "sigma_start": 1.0, "sigma_end": 1.0}
    zero, last = torch.zeros(1, 96), options["stages"] - 1
    for count in (0, 9, 10, 19, 20, 39, 40, 49, 50, 10**6):
        start, end = math.log(options["sigma_start"]), math.log(options["sigma_end"])
        sigma = math.exp(start + min(count // 10, last) / last * (end - start))
        unit = noisy(zero, count, constant)
        torch.testing.assert_close(noisy(zero, count, options), unit * sigma, rtol=1e-6, atol=0)


def test_the_noise_has_mean_zero_and_the_sigma_of_its_stage():
    z = noisy(torch.zeros(1, 1 << 16), 20)
    sigma = 0.05 * 0.01 ** (2 / 4)
    assert abs(z.mean()) < 5 * sigma / 2**8
    assert abs(z.std() / sigma - 1) < 5 / math.sqrt(2 * 2**16)


def test_noise_differs_between_forwards_and_sites_and_is_reproducible():
    zero = torch.zeros(4, 96)
    first = noisy(zero)
    assert (first == first[0]).all()
    assert torch.equal(noisy(zero), first)
    for other in (noisy(zero, 1), noisy(zero, key=noise.make_key("site", "fc2"))):
        assert (other != first).all()
        assert abs(torch.corrcoef(torch.stack([other[0], first[0]]))[0, 1]) < 5 / math.sqrt(96)


def test_other_operands_evaluation_and_products_without_weight_have_no_noise():
    w = gaussian(64, 96)
    q = fp4graph.fake_quantize(w, SPEC)
    for operand in Operand:
        assert torch.equal(noisy(w, operand=operand), q) == (operand is not Operand.FPROP_WEIGHT)
    rule = policy(SCHEDULE).rules[0]
    assert torch.equal(total(plan_site(layer.site, rule, training=False).program.fprop.right(w, DRAW)), q)
    with pytest.warns(PolicyWarning, match="no effect"):
        assert program_of(policy(SCHEDULE, op="matmul"), "matmul").fprop.right.parts == ()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_rollouts_have_the_noise_of_the_next_training_forward_if_the_policy_says_so(backend):
    """``rollout`` gives evaluation mode noise. All evaluations between two training forwards share one draw."""
    x = torch.eye(96)[:8]
    outputs = {}
    for rollout in (False, True):
        torch.manual_seed(0)
        rule = policy({**SCHEDULE, "rollout": rollout}, operands={"fprop.input": "keep", "backward": "keep"})
        model = fp4graph.apply(nn.Linear(96, 64, bias=False), rule, backend=backend, seed=1)
        weight = model.weight.detach().clone()
        seen = []
        for _ in range(2):
            model.eval()
            with torch.no_grad():
                seen += [model(x), model(x)]
            seen.append(model.train()(x).detach())
        outputs[rollout] = [y - fp4graph.fake_quantize(weight, SPEC).T[:8] for y in seen]
    first, again, trained, second, _, trained_again = outputs[True]
    assert torch.equal(first, again)
    for rolled, next_trained in ((first, trained), (second, trained_again)):
        torch.testing.assert_close(rolled, next_trained, rtol=0, atol=1e-6)
    assert 0.01 < first.std() < 0.1
    assert (first - second).abs().max() > 0.01
    first, _, trained, *_ = outputs[False]
    assert first.abs().max() < 1e-6
    torch.testing.assert_close(trained, outputs[True][2], rtol=0, atol=0)


def test_nan_poisons_its_block_alone_and_empty_tensors_pass():
    w = gaussian(4, 96)
    w[1, 40] = math.nan
    assert noisy(w).isnan().nonzero().tolist() == [[1, k] for k in range(32, 64)]
    assert noisy(w[:0]).shape == (0, 96)
    assert noisy(w[:, :0]).shape == (4, 0)


def test_a_tensor_scale_does_not_multiply_the_noise():
    """γ is a factor of Q(W), to which the noise is added, and not of the product."""
    w, z = gaussian(64, 96), noisy(torch.zeros(1, 96)).double()
    gamma = (w.abs().max() / torch.tensor(6.0 * 64)).item()
    q = fp4graph.fake_quantize((w / gamma), SPEC).double() * gamma
    w_hat = noisy(w, after=[{"tensor_scaling": {"target": 64}}])
    torch.testing.assert_close(w_hat.double(), q + z, rtol=0, atol=1e-6)


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.process
@pytest.mark.compiler
def test_inductor_makes_little_more_code_than_without_the_noise():
    """The size of the source stands for compile time, because seconds depend on the machine. With hashes inlined into
    the loop over a weight, the source was four times as large and compiled thirty times as long."""

    def compiled(*techniques):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 96), nn.GELU())
        model = fp4graph.apply(model, one_rule(*techniques), backend="inductor", seed=1)
        uncached = torch._inductor.config.patch(fx_graph_cache=False), aot.patch(enable_autograd_cache=False)
        with uncached[0], uncached[1]:
            _, code = run_and_get_code(lambda: model(gaussian(8, 96)).sum().backward())
        return "".join(code)

    codes = compiled(), compiled({"adaptive_quantization_noise": SCHEDULE})
    kernels = [re.findall(r"async_compile\.cpp_pybinding\(.*?\'\'\'\)", code, re.DOTALL) for code in codes]
    assert len(kernels[1]) <= len(kernels[0]) + 2  # an addition for each shape of weight
    assert len("".join(kernels[1])) < 2 * len("".join(kernels[0]))
    assert codes[1].count("fp4graph.gaussian.default(") == 2


def test_dgrad_that_reads_the_fprop_weight_sees_its_noise():
    """dX is dY·Ŵ with the noisy Ŵ of fprop; dW is dYᵀ·X."""
    x, w, dy = gaussian(40, 96, seed=1), gaussian(64, 96), gaussian(40, 64, seed=2)
    operands = {"fprop.input": "keep", "wgrad": "keep", "dgrad.grad_output": "keep", "dgrad.weight": "fprop"}
    y, dx, dw = layer.products(x, w, dy, operands=operands)
    torch.testing.assert_close(dw, dy.mT @ x)
    q = fp4graph.fake_quantize(w, SPEC)
    noise_of_y = y - x @ q.mT  # X·z, the same for every output
    torch.testing.assert_close(noise_of_y, noise_of_y[:, :1].expand_as(noise_of_y), rtol=0, atol=1e-4)
    z = (dx - dy @ q) / dy.sum(1, keepdim=True)  # the noise of dX is (Σ_n dY)·zᵀ
    torch.testing.assert_close(x @ z[0], noise_of_y[:, 0], rtol=0, atol=1e-4)
