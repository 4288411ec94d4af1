"""Statistics of a training equal their definitions, and leave the training as it is without them."""

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.lab import METRICS, Statistics, read
from fp4graph.model.runtime import runtime_of
from fp4graph.model.weight_quantizer import quantize
from fp4graph.technique.operands import Operand
from tests.helpers.policies import one_rule, quantizer
from tests.lab.trainings import tensorboard
from tests.model import test_experts as experts

pytestmark = pytest.mark.slow


def policy(backward="stochastic", techniques=(), phases=(), **operands):
    operands = {"backward": {"rounding": backward}, **operands}
    return one_rule(*techniques, quantize=quantizer(16, rounding="floor"), operands=operands, phases=list(phases))


def phase(at, *techniques):
    return {"at": at, "rules": policy(techniques=techniques)["rules"]}


class Net(nn.Module):
    """Two linears; the second is called twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 48)

    def forward(self, x):
        return self.second(torch.relu(self.second(torch.relu(self.first(x)))))


def make(policy_, model=None):
    model = fp4graph.apply(model or Net(), policy_, backend="eager")
    return model, fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def steps(model, optimizer, count, batches=1, start=0, shape=(8, 32), autocast=False):
    for step in range(start, start + count):
        generator = torch.Generator().manual_seed(step)
        for _ in range(batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(*shape, generator=generator)).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(folder, count, recipe=None, model=None, shape=(8, 32), **options):
    trained = make(recipe or policy(), model)
    with Statistics(*trained, directory=folder, **{"every": 2, **options}):
        steps(*trained, count, shape=shape)
    return read(folder)


def only(recorded, **wanted):
    (row,) = [r for r in recorded.rows if all(r[key] == value for key, value in wanted.items())]
    return row


def tensors(recorded, step):
    return {row["tensor"] for row in recorded.rows if row["step"] == step}


def recorded_without_effect(recipe, make_model, count, folder, shape=(8, 32), **options):
    """Check that a training with statistics ends with the same weights and random numbers; return the record."""
    trained = []
    for watched in (False, True):
        model, optimizer = make(recipe, make_model())
        torch.manual_seed(1)
        statistics = Statistics(model, optimizer, every=2, directory=folder, window=2, **options) if watched else None
        steps(model, optimizer, count, shape=shape)
        if watched:
            statistics.close()
        trained.append({**model.state_dict(), "random numbers afterwards": torch.rand(3)})
    for key, value in trained[0].items():
        assert not torch.is_tensor(value) or torch.equal(value, trained[1][key]), key
    return read(folder)


@pytest.mark.parametrize(
    "name", ["tetrajet-qema", *(pytest.param(name, marks=pytest.mark.long) for name in ("mxfp4-rl", "nvfp4-te"))]
)
def test_statistics_change_no_bit_of_a_training(name, vit, tmp_path):
    """The policies draw random bits and keep state, and the model has dropout."""
    probe = (torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(5)),)
    model = partial(vit, drop_rate=0.2, depth=3 if name == "nvfp4-te" else 2)
    rows = recorded_without_effect(name, model, 4, tmp_path, (4, 3, 32, 32), window_every=4, probe=probe)
    assert rows.steps == [2, 4]
    assert {r["tensor"] for r in rows.rows} >= {"fprop.input", "wgrad.input", "dgrad", "wgrad", "output"}


@pytest.mark.long
def test_a_phase_may_change_techniques_that_hook_the_step(tmp_path):
    """A new phase adds hooks to the optimizer while torch iterates over the hooks of a step."""
    recipe = policy(techniques=["q_ema"], phases=[phase(3, {"q_ema": {"beta": 0.5}})])
    rows = recorded_without_effect(recipe, Net, 6, tmp_path, window_every=2)
    assert rows.steps == [2, 6]  # the fourth step, the first of its phase, is not recorded


@pytest.mark.filterwarnings("ignore:this forward runs uncompiled")
def test_a_bare_layer_is_recorded_where_torch_compile_is_off(tmp_path):
    """The layer is the applied model, so its whole call runs uncompiled."""
    rows = []
    for stance in ("default", "force_eager"):
        torch.manual_seed(0)
        model = nn.Linear(32, 32)
        with torch.compiler.set_stance(stance):
            rows.append(recorded(tmp_path / stance, 4, model=model).rows)
    assert rows[0] == rows[1] != []


def test_a_site_whose_outlier_channels_are_multiplied_apart_is_one_site(tmp_path):
    wait, measure, split = ({"out_control": {"mode": mode}} for mode in ("wait", "measure", "split"))
    recipe = policy(techniques=[wait], phases=[phase(1, measure), phase(2, split)])
    rows = recorded_without_effect(recipe, Net, 4, tmp_path, window_every=2)
    assert set(rows.sites) == {"first", "second", "second#1"}  # a module called twice is two sites with one weight
    assert {r["site"] for r in rows.rows if r["tensor"] == "weight"} == {"first", "second"}
    only(rows, site="first", tensor="fprop.input", step=4)
    assert {"dgrad", "wgrad"} <= {r["tensor"] for r in rows.rows if (r["site"], r["step"]) == ("second", 4)}


def test_operands_by_hand(tmp_path):
    """All operands and both gradients of a linear, rounded to nearest, against NumPy on the tensors of the step."""
    model, optimizer = make(policy("nearest"), nn.Linear(32, 48))
    seen = {}
    with Statistics(model, optimizer, every=2, directory=tmp_path, sample=None, window=2):
        steps(model, optimizer, 1)
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).requires_grad_()
        w = model.weight.detach().clone()
        y = model(x)
        y.register_hook(lambda g: seen.update(dy=g))
        y.square().mean().backward()
        optimizer.step()
    dy = seen["dy"]
    spec = fp4graph.QuantSpec("e2m1", 16, fp4graph.ScaleSpec("e8m0", "floor"))
    operands = {
        "fprop.input": x, "fprop.weight": w, "dgrad.grad_output": dy, "dgrad.weight": w.T, "wgrad.grad_output": dy.T,
        "wgrad.input": x.T,
    }  # fmt: skip
    rows = read(tmp_path)
    quantized = {}
    for name, operand in operands.items():
        a = operand.detach().double().numpy()
        q = quantized[name] = fp4graph.fake_quantize(operand.detach(), spec).double().numpy()
        row = only(rows, step=2, tensor=name)
        assert (row["site"], row["elements"]) == ("(root)", a.size)
        error = ((q - a) ** 2).sum()
        assert row["snr_db"] == pytest.approx(10 * math.log10((a**2).sum() / error), rel=1e-5)
        assert row["underflowed"] == pytest.approx(((q == 0) & (a != 0)).mean(), abs=1e-6)
        # A block's maximum m·2^e with m in (1.5, 2) is scaled to m·4 > 6 and clipped.
        padded = np.pad(a, ((0, 0), (0, -a.shape[1] % 16))).reshape(a.shape[0], -1, 16)
        exponent = np.floor(np.log2(np.abs(padded).max(-1, keepdims=True)))
        clipped = np.abs(padded) / 2.0 ** (exponent - 2) > 6
        assert row["saturated"] == pytest.approx(clipped.sum() / a.size, abs=1e-6)
        parts = sum(row[part] for part in ("scale_bias", "dead_zone", "grid_noise", "interaction"))
        assert parts == pytest.approx(row["relative_error"], rel=1e-4)
        low = row["scales"]["lowest"]
        counts = {low + i: n for i, n in enumerate(row["scales"]["counts"]) if n}
        values, numbers = np.unique(exponent - 2, return_counts=True)
        assert counts == dict(zip(values.astype(int).tolist(), numbers.tolist(), strict=True))
    for gemm, other in (("dgrad", "weight"), ("wgrad", "input")):
        left, right = f"{gemm}.grad_output", f"{gemm}.{other}"
        row = only(rows, step=2, tensor=gemm)
        g = (operands[left].double() @ operands[right].double().mT).detach().numpy()
        got = quantized[left] @ quantized[right].T
        assert row["bias"] == pytest.approx(np.linalg.norm(got - g) / np.linalg.norm(g), rel=1e-5)
        assert row["gain"] == pytest.approx((got * g).sum() / (g * g).sum(), rel=1e-5)
        assert row["deviation"] == 0


def test_the_gradient_of_a_stochastic_backward_by_many_draws(tmp_path):
    """Bias and deviation of dW over random bits: the closed form against 400 backwards."""
    recipe = policy(**{"wgrad.input": {"source": "fprop", "rounding": "stochastic"}})
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    dy = torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    model, optimizer = make(recipe, nn.Linear(32, 48, bias=False))
    gradients = []
    with Statistics(model, optimizer, every=2, directory=tmp_path, sample=None, metrics=["gradient"]):
        for _ in range(2):
            model(x).backward(dy)
            optimizer.step()
    for _ in range(400):
        optimizer.zero_grad()
        model(x).backward(dy)
        gradients.append(model.weight.grad.clone())
    row = only(read(tmp_path), step=2, tensor="wgrad")
    exact = dy.T @ x
    draws = torch.stack(gradients)
    deviation = draws.var(0).sum().sqrt() / exact.norm()
    offset = ((draws.mean(0) - exact).square().sum() - draws.var(0).sum() / 400).clamp(min=0).sqrt() / exact.norm()
    assert row["deviation"] == pytest.approx(deviation.item(), rel=0.03)
    assert row["bias"] == pytest.approx(offset.item(), rel=0.03)
    assert row["gain"] == pytest.approx(((draws.mean(0) * exact).sum() / exact.square().sum()).item(), rel=0.01)


class Convolution(nn.Conv2d):
    """A convolution of rows of 32 numbers, taken as images; its kernels have 32 numbers and are rows of a matrix."""

    def __init__(self):
        super().__init__(2, 24, 4)

    def forward(self, x):
        return super().forward(x.view(-1, 2, 4, 4))


@pytest.mark.parametrize(
    "case",
    ["plain", "autocast", "autocast, rotated", "autocast, from master", "q_ema", "a list of elements", "a convolution"],
)
def test_oscillation_in_loops(case, tmp_path):
    """The paths of w and Q(w) over the window are kept beside the training, element by element."""
    several, autocast, master = case == "a list of elements", case.startswith("autocast"), case.endswith("from master")
    layer = Convolution() if case == "a convolution" else nn.Linear(32, 24)
    operands = {"fprop.weight": {"element": ["e2m1", "int4"]} if several else {"from_master": master}}
    techniques = {"q_ema": [{"q_ema": {"beta": 0.9}}], "autocast, rotated": [{"hadamard": {"block": 16}}]}.get(case, [])
    recipe = policy(techniques=techniques, **operands)
    recipe["rules"][0]["match"] = {"op": "conv" if case == "a convolution" else "linear"}
    model, optimizer = make(recipe, layer)
    w, q = [], []
    options = {"window": 6, "window_every": 25, "metrics": ["oscillation", "flips", "rate_of_change"]}
    with Statistics(model, optimizer, every=5, directory=tmp_path, sample=None, **options):
        for step in range(25):
            steps(model, optimizer, 1, start=step, autocast=autocast)
            runtime = runtime_of(model)
            weight = model.weight.detach().clone()
            w.append(weight.flatten(1))
            multiplied = weight.bfloat16() if autocast and not master else weight
            q.append(quantize(runtime.weights[0], multiplied, runtime.step).float().flatten(1))
    w, q = torch.stack(w[18:25]).double().numpy(), torch.stack(q[18:25]).double().numpy()
    moved, moved_q = np.abs(np.diff(w, axis=0)).sum(0), np.abs(np.diff(q, axis=0)).sum(0)
    ratio = np.divide(moved_q, moved, out=np.where(moved_q > 0, np.inf, 0.0), where=moved > 0)
    row = only(read(tmp_path), step=25, tensor="weight")
    assert row["window"] == 6
    assert row["oscillating"] == pytest.approx((ratio > 16).mean(), abs=1e-6)
    assert row["ratio_counts"][0] == (ratio == 0).sum()
    assert sum(row["ratio_counts"]) == ratio.size
    if several:  # a block that takes another element format may move values by less than a new scale does
        assert row["left_out"] == ["flips"]
        assert not {"flips", "flipping"} & row.keys()
    else:
        flips = np.abs(np.diff(q, axis=0)) > np.maximum(np.abs(q[1:]), np.abs(q[:-1])) / 8
        assert row["flips"] == pytest.approx(flips.mean(), abs=1e-6)
        assert row["flipping"] == pytest.approx(flips.any(0).mean(), abs=1e-6)
    for name, path in (("rate_of_change", w), ("quantized_rate_of_change", q)):
        norms = np.linalg.norm(np.diff(path, axis=0), axis=(1, 2)) / np.linalg.norm(path[:-1], axis=(1, 2))
        assert row[name] == pytest.approx(norms.mean(), rel=1e-4)
    if row["trajectories"]:
        example = row["trajectories"][0]
        assert len(example["weight"]) == 7
        assert any(np.allclose(w[:, i, j], example["weight"], rtol=1e-5) for i in range(24) for j in range(32))


def test_the_rate_of_change_of_outputs_by_hand(tmp_path):
    """Outputs for the probe change from step to step; a record has the mean over the last five steps of its window."""
    probe = torch.randn(5, 32, generator=torch.Generator().manual_seed(9))
    model, optimizer = make(policy())
    options = {"probe": probe, "metrics": ["rate_of_change"], "window": 7, "window_every": 8}
    outputs = []
    with Statistics(model, optimizer, every=50, directory=tmp_path, **options):
        for step in range(16):
            steps(model, optimizer, 1, start=step)
            with torch.no_grad():
                outputs.append(model.eval()(probe))
            model.train()
    rates = [((after - before).norm() / before.norm()).item() for before, after in pairwise(outputs)]
    for last in (8, 16):
        row = only(read(tmp_path), step=last, site="second#1", tensor="output")
        assert row["rate_of_change"] == pytest.approx(np.mean(rates[last - 6 : last - 1]), rel=1e-5)


def test_a_probe_runs_under_the_autocast_of_the_training(tmp_path):
    """Also before the first record."""
    model, optimizer = make(policy())
    dtypes = []
    model.first.register_forward_hook(lambda module, _, y: None if module.training else dtypes.append(y.dtype))
    options = {"probe": torch.ones(2, 32), "metrics": ["rate_of_change"], "window": 1, "window_every": 2}
    with Statistics(model, optimizer, every=50, directory=tmp_path, **options):
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                model(torch.ones(8, 32)).sum().backward()
            optimizer.step()
    assert dtypes == [torch.bfloat16] * 2


def test_statistics_cover_all_batches_of_a_step_no_evaluation_and_sites_without_tokens(tmp_path):
    """A site without tokens has statistics of its weight, and none of its products."""
    model, optimizer = make(policy())
    with Statistics(model, optimizer, every=2, directory=tmp_path, sample=None):
        steps(model, optimizer, 1)
        with torch.no_grad():
            model.eval()(torch.full((3, 32), 1e6))
        model.train()
        steps(model, optimizer, 1, batches=3, start=1)
        steps(model, optimizer, 2, shape=(0, 32))
    assert only(read(tmp_path), step=2, site="first", tensor="fprop.input")["elements"] == 3 * 8 * 32
    assert len(tensors(read(tmp_path), 2)) == 9  # six operands, two GEMMs, the gradient
    assert tensors(read(tmp_path), 4) == {"fprop.weight", "dgrad.weight", "weight.grad"}


def test_a_weight_without_elements_has_no_record(tmp_path):
    model, optimizer = make(policy(), nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 0)))
    with Statistics(model, optimizer, every=2, directory=tmp_path, window=2, window_every=4):
        for step in range(4):
            model(torch.randn(8, 32, generator=torch.Generator().manual_seed(step))).sum().backward()
            optimizer.step()
    assert {row["site"] for row in read(tmp_path).rows if row["tensor"] == "weight"} == {"0"}


def test_only_the_requested_metrics_and_sites_are_recorded(tmp_path):
    assert all(METRICS.values())  # each is described
    rows = recorded(tmp_path / "nothing", 4, "bf16")
    assert (rows.rows, rows.header["policy"]) == ((), "bf16")
    rows = recorded(tmp_path, 30, metrics=["snr", "confidence"], sites="sec*")
    assert set(rows.sites) == {"second", "second#1"}
    assert {key for row in rows.rows for key in row} == {
        "step", "site", "tensor", "elements", "nonfinite", "snr_db", "gain", "confidence", "confidence_histogram",
    }  # fmt: skip


def test_confidence_and_latent_values_are_those_of_the_weight_alone(tmp_path):
    """Even where the input has the weight's shape and quantizer, so that both are measured together."""
    model, optimizer = make(policy("nearest"), nn.Linear(32, 8))
    with Statistics(model, optimizer, every=2, directory=tmp_path, sample=None):
        steps(model, optimizer, 1)
        w = model.weight.detach().clone()
        steps(model, optimizer, 1, start=1)
    rows = read(tmp_path)
    assert [r["tensor"] for r in rows.rows if "confidence" in r or "latent" in r] == ["fprop.weight"]
    row = only(rows, step=2, tensor="fprop.weight")
    blocks = w.double().numpy().reshape(-1, 16)
    u = np.abs(blocks) / 2.0 ** (np.floor(np.log2(np.abs(blocks).max(1, keepdims=True))) - 2)
    thresholds, half = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]), [0.25, 0.25, 0.25, 0.25, 0.375, 0.5, 0.75, 1]
    u = u.clip(max=6)
    expected = np.abs(u[..., None] - thresholds).min(-1) / np.array(half)[np.searchsorted(thresholds, u)]
    assert row["confidence"] == pytest.approx(expected.mean(), rel=1e-4)
    assert sum(row["confidence_histogram"]) == sum(row["latent"]["counts"]) == w.numel()


def test_blocks_that_choose_their_element_have_no_confidence(tmp_path):
    """Confidence needs the thresholds of one format; everything else is measured."""
    chosen = {"element": ["e2m1", "int4"]}
    rows = recorded(tmp_path, 2, policy(forward=chosen, gradients=chosen)).rows
    weight = [r for r in rows if r["tensor"] == "fprop.weight"]
    assert len(weight) == 3
    assert all(r["left_out"] == ["confidence"] and "confidence" not in r for r in weight)
    assert not any("left_out" in r for r in rows if r["tensor"] != "fprop.weight")
    assert all(r["latent"]["limit"] == 6 and sum(r["latent"]["counts"]) for r in weight)
    assert all(r["relative_error"] < 0.1 for r in weight)


@pytest.mark.long
def test_statistics_follow_phases_under_autocast(tmp_path):
    recipe = policy(phases=[{"at": 5, "operands": {"backward": "keep"}}])
    with torch.autocast("cpu", torch.bfloat16):
        rows = recorded(tmp_path, 8, recipe, window=2, window_every=4, probe=(torch.zeros(2, 32),))
    assert rows.steps == [2, 4, 8]  # the sixth step, the first of its phase, is not recorded
    assert {"wgrad.input", "dgrad", "output"} <= tensors(rows, 4)
    assert {"fprop.input", "output"} <= tensors(rows, 8)
    assert not {"wgrad.input", "dgrad.weight"} & tensors(rows, 8)


@pytest.mark.long
def test_gradient_checkpointing_changes_no_statistic(vit, tmp_path):
    """It runs the forward twice, which must be counted once."""
    measured = []
    for checkpointed in (False, True):
        model, folder = vit(), tmp_path / str(checkpointed)
        model.set_grad_checkpointing(checkpointed)
        rows = recorded(folder, 2, "microscaling", model, shape=(2, 3, 32, 32), window=2).rows
        measured.append(
            {(r["site"], r["tensor"]): r.get("snr_db", r.get("bias")) for r in rows if r["tensor"] != "weight.grad"}
        )
    assert measured[1] == pytest.approx(measured[0], rel=1e-3)


def test_a_resumed_training_goes_on_counting(tmp_path):
    """The optimizer's state has the number of steps; after an earlier checkpoint is loaded ``step`` gives it."""
    trained = make(policy())
    for count, options, expected in ((12, {}, [5, 10]), (4, {}, [5, 10, 15]), (4, {"step": 8}, [5, 10])):
        with Statistics(*trained, every=5, directory=tmp_path, **options):
            steps(*trained, count)
        assert read(tmp_path).steps == expected


def test_a_resumed_training_whose_optimizer_counts_anew(tmp_path):
    """StableSPAM resets its count of steps with its moments. Closed statistics leave no hook."""
    model = fp4graph.apply(Net(), policy(), backend="eager")
    inner = fp4graph.optim.StableSPAM(model.parameters(), lr=1e-3, reset_interval=4)
    optimizer = fp4graph.prepare_optimizer(model, inner)
    for start in (0, 10):
        with Statistics(model, optimizer, every=5, directory=tmp_path, metrics=["snr"]):
            steps(model, optimizer, 10, start=start)
        assert not {**optimizer._optimizer_step_pre_hooks, **optimizer._optimizer_step_post_hooks}
    steps(model, optimizer, 5)
    assert read(tmp_path).steps == [5, 10, 15, 20]


class Hookless(torch.optim.Optimizer):
    step = None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": ["snr", "confidense"]}, "unknown metric 'confidense'; did you mean 'confidence'"),
        ({"metrics": []}, "metrics is empty; choose from snr"),
        ({"sites": "frist"}, "no quantized site matches 'frist'; did you mean 'first'"),
        ({"sites": "layers.[0-11].*"}, r"\[0-11\] in a glob matches one character, .* for the characters \[01\]"),
        ({"sites": ["second", "sceond"]}, "no quantized site matches 'sceond'; did you mean 'second'"),
        ({"model": Net()}, r"takes a model that fp4graph\.apply has prepared"),
        ({"optimizer": Hookless.__new__(Hookless)}, "Hookless runs no hooks around its step"),
        ({"every": 0}, "every must be a whole number of at least 1"),
    ],
)
def test_arguments_that_statistics_refuse(options, message, tmp_path):
    model, optimizer = make(policy())
    with pytest.raises((fp4graph.Error, ValueError), match=message):
        Statistics(**{"model": model, "optimizer": optimizer, "every": 2, "directory": tmp_path, **options})


def test_an_unknown_occurrence_of_a_module_is_an_error(tmp_path):
    """Occurrences are known only once the model has run."""
    with pytest.raises(fp4graph.Error, match=r"no quantized site matches 'second#2'; did you mean 'second#1'"):
        recorded(tmp_path, 2, sites="second#2")


def test_a_model_under_ddp_is_observed(tmp_path):
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        model, optimizer = make(policy())
        wrapped = nn.parallel.DistributedDataParallel(model)
        options = {"window": 1, "window_every": 2, "probe": (torch.ones(2, 32),)}
        with Statistics(wrapped, optimizer, every=2, directory=tmp_path, **options):
            steps(wrapped, optimizer, 2)
    finally:
        torch.distributed.destroy_process_group()
    assert {"fprop.input", "wgrad", "output"} <= {row["tensor"] for row in read(tmp_path).rows}


def test_sharded_models_are_refused_before_the_training(tmp_path, monkeypatch):
    """In every process: an error or a collective of the first process alone would leave the others waiting."""
    monkeypatch.setattr("fp4graph.lab.statistics.collect.fsdp_modules", lambda model: [model])
    with pytest.raises(fp4graph.Error, match="under fully_shard cannot be observed"):
        Statistics(*make(policy()), every=50, directory=tmp_path)


@pytest.mark.parametrize("techniques", [[], ["q_ema"]], ids=["plain", "q_ema"])
def test_a_model_that_is_removed_before_its_statistics_are_closed_is_an_error(techniques, tmp_path):
    model, optimizer = make(policy(techniques=techniques))
    with Statistics(model, optimizer, every=2, directory=tmp_path):
        steps(model, optimizer, 1)
        fp4graph.remove(model)
        with pytest.raises(fp4graph.Error, match="close the Statistics before"):
            steps(model, optimizer, 1)


def test_gradient_norms_in_records_and_in_tensorboard(tmp_path):
    """Each is the norm of a weight's gradient as the optimizer receives it."""
    model, optimizer = make(policy())
    seen = {}

    def look(*args):
        step = 1 + len(seen) // 2
        seen.update({(step, site): getattr(model, site).weight.grad.norm().item() for site in ("first", "second")})

    optimizer.register_step_pre_hook(look)
    options = {"metrics": "gradient_norm", "stream": tmp_path / "events"}
    with Statistics(model, optimizer, every=2, directory=tmp_path, **options):
        steps(model, optimizer, 4)
    expected = {key: norm for key, norm in seen.items() if key[0] in (2, 4)}
    rows = [row for row in read(tmp_path).rows if row["tensor"] == "weight.grad"]
    assert {(row["step"], row["site"]): row["gradient_norm"] for row in rows} == pytest.approx(expected, rel=1e-5)
    scalars = tensorboard(tmp_path / "events").Scalars
    shown = {
        (event.step, site): event.value
        for site in ("first", "second")
        for event in scalars(f"gradient_norm/{site}/weight.grad")
    }
    assert shown == pytest.approx(expected, rel=1e-4)


def test_the_gradient_norm_of_a_step_with_a_closure_is_that_of_its_own_gradient(tmp_path):
    """As in Lightning, the closure computes the gradient inside the step, after the hooks before the step."""
    model, optimizer = make(policy())
    expected = {}

    def closure(step):
        optimizer.zero_grad()
        loss = model(torch.full((8, 32), float(step))).square().mean()
        loss.backward()
        expected[step] = model.first.weight.grad.norm().item()
        return loss

    with Statistics(model, optimizer, every=2, directory=tmp_path, metrics="gradient_norm", sites="first"):
        optimizer.step(partial(closure, 1))
        optimizer.step(closure=partial(closure, 2))
        optimizer.step(partial(closure, 3))
        optimizer.step(partial(closure, 4))
    for step in (2, 4):
        assert only(read(tmp_path), step=step, tensor="weight.grad")["gradient_norm"] == pytest.approx(
            expected[step], rel=1e-5
        )


@pytest.mark.long
@pytest.mark.parametrize("name", ["nvfp4-te", "tetrajet-qema"])
def test_experts_are_recorded(name, tmp_path):
    model = experts.applied(name)
    optimizer = experts.prepared(model)
    with Statistics(model, optimizer, directory=tmp_path, every=1, window=2, window_every=2):
        experts.train(model, optimizer, range(4))
    rows = read(tmp_path).rows
    for site in ("layers.1.experts", "layers.1.experts#1"):
        assert {str(operand) for operand in Operand} <= {row["tensor"] for row in rows if row["site"] == site}
    assert {row["tensor"] for row in rows if row["site"] == "layers.1.experts" and "window" in row} == {"w1", "w2"}
