"""q_ramping against Algorithm 2 of the TetraJet paper in NumPy."""

from __future__ import annotations

import copy
import math
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import timm.optim
import torch
from fp4graph_plugins.q_ramping import QRamping
from torchao.optim.subclass_8bit import OptimState8bit

import fp4graph
from fp4graph.optim import StableSPAM
from fp4graph.technique import hooks_of
from tests.helpers.catalogue import TRAINING
from tests.helpers.policies import TIES_UP, one_rule, with_technique
from tests.helpers.steps import push, same
from tests.helpers.training import applied as apply
from tests.plugins.layer import linear, pushes, stepped
from tests.recipes import optimizer_references as references

OPTIONS = TRAINING["q_ramping"]

policy = partial(with_technique, "q_ramping", quantize=TIES_UP)
adamw = partial(torch.optim.AdamW, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
momentum = partial(torch.optim.SGD, lr=3e-3, momentum=0.9, weight_decay=0.1)


def drive(applied, optimizer, grads):
    push(optimizer, (applied.weight, applied.bias), grads)


def prepared(options=OPTIONS, make=adamw, dtype=torch.float32):
    return stepped(policy(options), make, dtype)


def unprepared(make=adamw):
    plain = linear()
    return plain, make(plain.parameters())


def factors(applied, optimizer):
    return optimizer.state[applied.weight]["fp4graph.q_ramping.factor"]


#: One step of each optimizer, in NumPy.
UPDATES = {
    "adamw": partial(references.adamw, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1),
    "sgd": lambda w, g, state: references.sgd(w, g + 0.1 * w, state, lr=3e-3, momentum=0.9),
}


def algorithm_2(steps, kind, options, changed=(math.inf, {})):
    """Return the final weights and the set of all N. ``changed`` is a step, and the options that change there."""
    w, state, chosen, place = linear().weight.detach().double().numpy(), {}, set(), options["t_update"]
    for t, (grad, _) in enumerate(pushes(steps)):
        if t == changed[0]:
            options = {**options, **changed[1]}
        if place >= options["t_update"]:
            place, ramped, detects = 0, 0, True
            n, summed, way, way_q = np.ones_like(w), *np.zeros((3, *w.shape))
        ramped += not detects
        summed = summed + grad.double().numpy()
        due, before, moments = ramped % n == 0, w, dict(state)
        moved = w + n * (UPDATES[kind](w, summed / n, state) - w)  # at n times the learning rate
        for name in moments.keys() - {"step"}:  # the step counts all steps
            state[name] = np.where(due, state[name], moments[name])
        w, summed = np.where(due, moved, w), np.where(due, 0.0, summed)
        place += 1
        if detects:
            q, before_q = (references.tetrajet_weight(each.astype(np.float32)) for each in (w, before))
            way, way_q = way + np.abs(w - before), way_q + np.abs(q - before_q)
        if detects and place >= options["t0"]:
            detects, ratio = False, references.oscillation_ratio(way_q, way)
            n = np.minimum(options["k2"] * np.floor(ratio / options["k1"]) + 1, options["n_max"])
            chosen |= {*n.flatten()}
    return torch.from_numpy(w), chosen


def assert_algorithm_2(applied, *arguments):
    expected, chosen = algorithm_2(*arguments)
    # fp32 against fp64, after some dozens of steps of at most 12e-3.
    torch.testing.assert_close(applied.weight.double(), expected, rtol=1e-5, atol=2e-6)
    return chosen


@pytest.mark.parametrize("options", [OPTIONS, {**OPTIONS, "n_max": 12, "k1": 1e-3}])  # 12: all steps between detections
@pytest.mark.parametrize(("kind", "make"), [("adamw", adamw), ("sgd", momentum)])
@pytest.mark.parametrize("steps", [8, 19, 20, 47])
def test_weights_are_those_of_algorithm_2(kind, make, steps, options):
    applied, optimizer = prepared(options, make)
    drive(applied, optimizer, pushes(steps))
    chosen = assert_algorithm_2(applied, steps, kind, options)
    assert len(chosen) > 2 or 12 in chosen  # N differs between elements


def test_elements_that_do_not_oscillate_have_the_bits_of_a_plain_optimizer():
    (applied, optimizer), (plain, plain_optimizer) = prepared(), unprepared()
    drive(applied, optimizer, pushes(18))
    drive(plain, plain_optimizer, pushes(18))
    factor = factors(applied, optimizer)
    assert 0 < (factor > 1).sum() < factor.numel() / 4
    assert torch.equal(applied.weight[factor == 1], plain.weight[factor == 1])
    assert torch.equal(applied.bias, plain.bias)
    assert not torch.equal(applied.weight[factor > 1], plain.weight[factor > 1])


def change(applied, optimizer, options):
    fp4graph.prepare_optimizer(apply(applied, policy(options)), optimizer)


#: Steps in a detection, at its end, after it, and in the second detection.
MOMENTS = [3, 5, 8, 11, 22]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("other", [{"t0": 4}, {"t0": 12}, {"t_update": 14}, {"t_update": 27}, {"n_max": 2}], ids=str)
def test_options_changed_in_training_act_from_the_next_detection(at, other):
    applied, optimizer = prepared()
    grads = pushes(47)
    drive(applied, optimizer, grads[:at])
    change(applied, optimizer, {**OPTIONS, **other})
    drive(applied, optimizer, grads[at:])
    assert max(assert_algorithm_2(applied, 47, "adamw", OPTIONS, (at, other))) > 1


@pytest.mark.slow
def test_a_phase_changes_options():
    other = {"t0": 12}
    changed = policy({**OPTIONS, **other})["rules"]
    applied, optimizer = stepped(policy(OPTIONS, phases=[{"at": 5, "rules": changed}]), adamw)
    for grad in pushes(30):
        applied(torch.ones(2, 64))  # phases count forwards
        drive(applied, optimizer, [grad])
    assert_algorithm_2(applied, 30, "adamw", OPTIONS, (5, other))


@pytest.mark.parametrize("at", MOMENTS)
@pytest.mark.parametrize("restore", [False, True])
def test_a_detection_is_undone_if_restore_was_set_when_it_began(restore, at):
    (applied, optimizer), (kept, kept_optimizer) = (prepared({**OPTIONS, "restore": restore}) for _ in range(2))
    grads = pushes(27)
    end = 20 if at < 20 else 27  # the end of the first period, or a step before the end of the second detection
    drive(applied, optimizer, grads[:at])
    change(applied, optimizer, {**OPTIONS, "restore": not restore})
    drive(applied, optimizer, grads[at:end])
    drive(kept, kept_optimizer, grads[:end])
    assert same(applied.parameters(), kept.parameters())
    if at == 22:  # the second detection ends by the option that was set when it began
        drive(applied, optimizer, pushes(1))
        drive(kept, kept_optimizer, pushes(1))
        assert torch.equal(applied.weight, kept.weight)


def with_resets(how, options, interval):
    if how == "optimizer":
        return prepared(options, partial(StableSPAM, lr=3e-3, reset_interval=interval))
    techniques = [{"q_ramping": options}, {"stable_spam": {"reset_interval": interval}}]
    return stepped(one_rule(quantize=TIES_UP, techniques=techniques), adamw)


@pytest.mark.parametrize("how", ["technique", "optimizer"])
def test_a_reset_reaches_the_moments_of_elements_that_wait(how):
    """A reset sets the moments of all elements to 0. Those of waiting elements stay 0, because their gradient is 0."""
    applied, optimizer = with_resets(how, {**OPTIONS, "k1": 0.5}, 12)
    grads = pushes(12)
    drive(applied, optimizer, grads[:11])
    state = optimizer.state[applied.weight]
    waiting = 4 % factors(applied, optimizer).int() != 0  # the fourth step after the detection
    assert waiting.any()
    assert state["exp_avg"][waiting].all()
    drive(applied, optimizer, grads[11:])
    assert not state["exp_avg"][waiting].any()
    assert not state["exp_avg_sq"][waiting].any()
    assert not [name for name in state if "held" in name]


@pytest.mark.parametrize("how", ["technique", "optimizer"])
def test_moments_reset_in_a_detection_stay_reset_after_restore(how):
    applied, optimizer = with_resets(how, {**OPTIONS, "restore": True}, 24)
    drive(applied, optimizer, pushes(28))  # the second detection is steps 21 to 28
    for parameter in applied.parameters():
        state = optimizer.state[parameter]
        assert not any(state[name].any() for name in ("exp_avg", "exp_avg_sq", "step"))


def of_timm(name):
    return lambda parameters: timm.optim.create_optimizer_v2(list(parameters), opt=name, lr=3e-3)


#: Optimizers that initialize their states in different ways.
BEGINNERS = {
    "AdamW": adamw,
    "momentum": momentum,
    "dampened": partial(momentum, dampening=0.5),
    **{name: partial(getattr(torch.optim, name), lr=3e-3) for name in ("NAdam", "RAdam", "Rprop")},
    "ASGD": partial(torch.optim.ASGD, lr=3e-3, t0=2),
    "Adagrad": partial(torch.optim.Adagrad, lr=3e-3, initial_accumulator_value=0.1),
    "RMSprop": partial(torch.optim.RMSprop, lr=3e-3, momentum=0.9, centered=True),
    **{name: of_timm(name) for name in ("adamp", "nadamlegacy", "rmsproptf", "adopt", "madgrad", "lion")},
}


@pytest.mark.parametrize("name", BEGINNERS)
def test_after_restore_the_optimizer_begins_as_a_new_one(name):
    make, grads = BEGINNERS[name], pushes(19)
    applied, optimizer = prepared({**OPTIONS, "k1": 1e9, "restore": True}, make)  # all N are 1
    plain, plain_optimizer = unprepared(make)
    drive(applied, optimizer, grads)
    drive(plain, plain_optimizer, grads[8:])
    assert same(applied.parameters(), plain.parameters())


@pytest.mark.parametrize("name", [name for name in BEGINNERS if name != "Adagrad"])
def test_waiting_elements_keep_the_initial_state_of_the_optimizer(name):
    """The first step after restore initializes the state; it is an ordinary step for every element."""
    make, grads = BEGINNERS[name], pushes(12)
    applied, optimizer = prepared({**OPTIONS, "k1": 1e-3, "n_max": 3, "restore": True}, make)
    plain, plain_optimizer = unprepared(make)
    drive(applied, optimizer, grads[:9])
    drive(plain, plain_optimizer, grads[8:9])
    assert torch.equal(applied.weight, plain.weight)
    waiting = factors(applied, optimizer) == 3
    assert waiting.any()
    drive(applied, optimizer, grads[9:11])
    assert torch.equal(applied.weight[waiting], plain.weight[waiting])
    for entry, value in plain_optimizer.state[plain.weight].items():
        if isinstance(value, torch.Tensor) and value.shape == plain.weight.shape:
            assert torch.equal(optimizer.state[applied.weight][entry][waiting], value[waiting])
    drive(applied, optimizer, grads[11:])
    assert not torch.equal(applied.weight[waiting], plain.weight[waiting])


@pytest.mark.parametrize(
    ("make", "kept", "message"),
    [(of_timm("lamb"), {}, "Lamb counts its steps for a whole group"), (adamw, {"history": [1]}, "'history', a list")],
    ids=["counts of a group", "neither a tensor nor a number"],
)
def test_optimizers_whose_state_cannot_be_restored_are_refused(make, kept, message):
    applied, optimizer = prepared({**OPTIONS, "restore": True}, make)
    if kept:
        optimizer.state[applied.weight].update(kept)
    with pytest.raises(fp4graph.Error, match=rf"{message}.*restore: false"):
        drive(applied, optimizer, pushes(1))


@pytest.mark.parametrize("make", [adamw, momentum])
def test_restore_undoes_the_detection(make):
    (applied, optimizer), (kept, kept_optimizer) = prepared({**OPTIONS, "restore": True}, make), prepared(make=make)
    start = linear().weight
    drive(applied, optimizer, pushes(8))
    drive(kept, kept_optimizer, pushes(8))
    assert torch.equal(factors(applied, optimizer), factors(kept, kept_optimizer))  # of the steps that were undone
    assert torch.equal(applied.weight, start)
    # The second detection starts when the optimizer has state.
    drive(applied, optimizer, pushes(12))
    middle = copy.deepcopy([p.detach() for p in applied.parameters()])
    drive(applied, optimizer, pushes(8))
    assert same(applied.parameters(), middle)
    assert not torch.equal(middle[0], start)
    assert not [n for n in optimizer.state[applied.weight] if "saved" in n]


def test_a_checkpoint_that_torch_rounded_when_it_was_loaded_is_refused():
    applied, optimizer = prepared(dtype=torch.bfloat16)
    drive(applied, optimizer, pushes(12, torch.bfloat16))
    late = adamw(applied.parameters())
    late.load_state_dict(optimizer.state_dict())
    with pytest.raises(fp4graph.Error, match="prepare the optimizer first"):
        fp4graph.prepare_optimizer(applied, late)


def test_ratios_with_zero_distances():
    """0/0 is 0, so N is 1; an element whose quantized value moves while the weight does not has N_max."""
    (hook,) = hooks_of(QRamping(t_update=40, n_max=7, t0=1))
    names, still = ("moved", "moved_q", "last", "last_q"), torch.zeros(4)
    memory = {"steps": torch.tensor(0), **{name: torch.zeros(4) for name in names}}
    update = SimpleNamespace(memory=memory, parameter=still, quantize=lambda w: w, scratch={})
    memory["moved_q"] = torch.tensor([0.0, 1.0, 15.9, 16.0])
    memory["moved"] = torch.tensor([0.0, 0.0, 1.0, 1.0])
    hook.after_step(update)
    assert memory["factor"].tolist() == [1, 7, 1, 6]
    assert not set(names) & set(memory)
    update.memory = {"steps": torch.tensor(0), **{name: torch.zeros(4) for name in names}}
    hook.after_step(update)
    assert [*update.memory] == ["steps"]  # no factor, since no element oscillates


def test_a_step_without_gradient_is_not_counted():
    applied, optimizer = prepared()
    drive(applied, optimizer, [(None, torch.ones(6))])
    assert "fp4graph.q_ramping.steps" not in optimizer.state.get(applied.weight, {})
    drive(applied, optimizer, pushes(12))
    assert (factors(applied, optimizer) > 1).any()


def test_gradients_not_yet_unscaled_are_refused():
    _, optimizer = prepared()
    optimizer.grad_scale = torch.ones(())
    with pytest.raises(fp4graph.Error, match="unscale_"):
        optimizer.step()


@pytest.mark.parametrize(("restore", "at", "remedy"), [(True, 20, "restore: false"), (False, 8, "not quantized")])
def test_quantized_state_of_an_optimizer_is_refused(restore, at, remedy):
    """Its elements share scales, so that none can be put back alone."""
    applied, optimizer = prepared({**OPTIONS, "k1": 1e-3, "restore": restore})
    drive(applied, optimizer, pushes(at))
    shape = applied.weight.shape
    optimizer.state[applied.weight]["exp_avg"] = OptimState8bit.zeros(shape, block_size=shape[1])
    with pytest.raises(fp4graph.Error, match=f"keeps 'exp_avg', a OptimState8bit, .*{remedy}"):
        drive(applied, optimizer, pushes(1))
