"""out_control against TetraJet-v2 in NumPy: the channels that it chooses, their values, and what it refuses."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fp4graph
from fp4graph.errors import CaptureError
from fp4graph.model import weight_quantizer
from fp4graph.model.runtime import runtime_of
from tests.helpers import training
from tests.helpers.policies import NVFP4, loaded, one_rule
from tests.helpers.training import assert_equal, prepared
from tests.recipes.bits import SiteBits
from tests.recipes.linear import Data, applied, mismatches, step
from tests.recipes.newest_references import chosen_channels, double_block, mxfp8, tetrajet_v2_split
from tests.recipes.other_references import quantize

pytestmark = pytest.mark.usefixtures("operation_by_operation")

BACKWARD = ({"hadamard": {"scope": "backward", "block": 16}}, {"stochastic_rounding": {"operands": "backward"}})
MEASURE, SPLIT = 2, 4  # forwards before these phases of in_phases()
WAIT = {"out_control": {"mode": "wait"}}
NORMS = "blocks.1.fc._fp4graph_out_control_norms"


def in_phases(more: tuple[Any, ...] = (), rule: Any = None, **split: Any) -> dict[str, Any]:
    """Return a policy of one rule that measures after two forwards and splits after four."""

    def policy(phases: Any = (), **options: Any) -> dict[str, Any]:
        return one_rule({"out_control": options}, *more, quantize=NVFP4, **(rule or {}), phases=phases)

    rules = policy(mode="measure")["rules"], policy(mode="split", **split)["rules"]
    return policy([{"at": at, "rules": each} for at, each in zip((MEASURE, SPLIT), rules, strict=True)], mode="wait")


def layer(bias: bool = True) -> nn.Module:
    """Return a model of one linear layer, ``fc``, with sizes that no block divides."""
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(fc=nn.Linear(70, 40, bias=bias)))


def batch(number: int, tokens: int = 24) -> torch.Tensor:
    """Return activations in which some channels are far larger than others, in part other channels in each batch."""
    generator = torch.Generator().manual_seed(number)
    always, now = torch.randn(70, generator=torch.Generator().manual_seed(99)), torch.randn(70, generator=generator)
    return torch.randn(2, tokens // 2, 70, generator=generator) * torch.exp(always + now)


def trained(model: nn.Module, optimizer: Any, steps: range, accumulate: int = 1) -> list[torch.Tensor]:
    """Return the outputs of every forward; forward n is on ``batch(n)``."""
    outputs = []
    for number in steps:
        outputs.append(model(batch(number)))
        (outputs[-1] - 1).square().mean().backward()
        if (number + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [y.detach() for y in outputs]


def started(policy: Any, backend: str = "eager", **more: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = training.applied(layer(**more), policy, backend=backend)
    return model, prepared(model, torch.optim.SGD, lr=1e-3, momentum=0.9)


def norms_of(number: int) -> np.ndarray:
    return np.linalg.norm(batch(number).double().numpy().reshape(-1, 70), axis=0)


def measured() -> np.ndarray:
    """Return the sums of the channels' norms over the measured forwards."""
    return sum(norms_of(number) for number in range(MEASURE, SPLIT))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_values_of_chosen_channels(seed: int) -> None:
    """y, dX and dW in the last phase of the shipped policy, with channels of very different norms."""
    data = Data.wide(seed)
    model = applied(fp4graph.load_policy("tetrajet-v2").phases[-1].policy, data)
    norms = np.random.default_rng(seed).permutation(data.x.shape[1]).astype(np.float32)
    state = model.state_dict()
    state[NORMS] = torch.from_numpy(norms)
    model.load_state_dict(state)
    draw = SiteBits("blocks.1.fc", signs_per_block=16)
    reference = tetrajet_v2_split(data.x, data.w, data.dy, draw, norms)
    got = step(model, data)
    # Rounding errors of the backward's rotations decide ties; elsewhere there is one right value.
    assert mismatches((got[0], *reference[1:], got[3]), [reference], data) == []
    chosen, rest = chosen_channels(norms)
    dw, bound = got[2] - reference[2], np.outer(np.linalg.norm(data.dy, axis=0), np.linalg.norm(data.x, axis=0))
    assert (np.abs(dw[:, chosen]) <= 1e-4 * bound[:, chosen]).all()  # chosen channels are not rounded stochastically
    assert (np.abs(dw[:, rest]) > 1e-4 * bound[:, rest]).mean() < 2e-3
    whole = np.outer(np.linalg.norm(data.dy, axis=1), np.linalg.norm(data.w, axis=0))
    assert (np.abs(got[1] - reference[1]) > 1e-4 * whole).mean() < 2e-3


@pytest.mark.captured
@pytest.mark.slow
def test_the_split_is_by_the_norms_of_the_measured_forwards() -> None:
    model, optimizer = started(in_phases())
    trained(model, optimizer, range(SPLIT))
    np.testing.assert_allclose(model.fc._fp4graph_out_control_norms.double().numpy(), measured(), rtol=1e-6)
    assert not model.fc._fp4graph_out_control_fprop_input_recent.any()

    before = model.fc._fp4graph_out_control_norms.clone()
    tensors = model.fc.weight, model.fc.bias, batch(SPLIT).reshape(-1, 70)
    w, bias, x = (t.detach().double().numpy().copy() for t in tensors)
    (y,) = trained(model, optimizer, range(SPLIT, SPLIT + 1))
    chosen, rest = chosen_channels(measured())
    assert len(chosen) == 7
    nvfp4 = {"block": 16, "fmt": "e4m3", "rule": "nearest_even"}
    expected = quantize(x[:, rest], 1, **nvfp4) @ quantize(w[:, rest], 1, **nvfp4).T
    expected += mxfp8(x[:, chosen], 1) @ mxfp8(w[:, chosen], 1).T + bias
    np.testing.assert_allclose(y.reshape(-1, 40).double().numpy(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(model.fc._fp4graph_out_control_norms, before)  # the split does not measure


@pytest.mark.slow
def test_each_accumulated_forward_is_measured_and_forwards_without_gradients_are_not() -> None:
    model, optimizer = started(in_phases())
    trained(model, optimizer, range(MEASURE), accumulate=2)
    for number in range(MEASURE, SPLIT):
        with torch.no_grad():
            model(batch(50))
        trained(model, optimizer, range(number, number + 1), accumulate=2)
    np.testing.assert_allclose(model.fc._fp4graph_out_control_norms.double().numpy(), measured(), rtol=1e-6)


@pytest.mark.slow
def test_until_the_split_training_has_the_bits_of_a_rule_without_the_technique() -> None:
    plain, split = started(one_rule(quantize=NVFP4)), started(in_phases())
    assert_equal(trained(*split, range(SPLIT)), trained(*plain, range(SPLIT)))
    assert torch.equal(split[0].fc.weight, plain[0].fc.weight)
    (y,), (reference,) = (trained(*each, range(SPLIT, SPLIT + 1)) for each in (split, plain))
    assert not torch.equal(y, reference)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 3, SPLIT, 5])  # before measuring, in it, at the split, after it
def test_a_resumed_run_equals_the_whole_run(at: int) -> None:
    whole, first, second = (started(in_phases(more=BACKWARD)) for _ in range(3))
    outputs = trained(*whole, range(7))
    trained(*first, range(at))
    saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    assert saved[0].keys() == second[0].state_dict().keys()  # all phases have the same keys
    second[0].load_state_dict(saved[0])
    second[1].load_state_dict(saved[1])
    assert_equal(trained(*second, range(at, 7)), outputs[at:])
    assert_equal(*(each[0].state_dict().values() for each in (second, whole)))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.compiler)])
def test_compiled_training_agrees_with_eager(backend: str) -> None:
    policy = in_phases(more=(*BACKWARD, {"tensor_scaling": {"granularity": 32}}))
    eager, other = started(policy), started(policy, backend)
    outputs = [trained(*each, range(6)) for each in (eager, other)]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)  # GEMMs sum in another order
    assert torch.equal(*(each[0].fc._fp4graph_out_control_norms for each in (eager, other)))


@pytest.mark.captured
@pytest.mark.slow
def test_a_split_is_explained_and_takes_no_more_flops_than_the_whole_layer() -> None:
    policy = fp4graph.load_policy(in_phases()).phases[-1].policy
    x = batch(0).requires_grad_()
    listed = fp4graph.explain(layer(), policy, (x,))
    assert "7 of 70 input channels" in " ".join(word for word in str(listed).split() if word != "│")
    (site,) = listed.to_json()["sites"]
    assert site["apart_channels"] == 7
    operands = ("fprop.input", "fprop.weight", "wgrad.grad_output", "wgrad.input")
    assert site["apart"] == dict.fromkeys(operands, "e4m3/32 e8m0 ceil RTN-even")
    model = fp4graph.apply(layer(), policy, backend="eager")
    with FlopCounterMode(display=False) as forward, pytest.warns(fp4graph.PolicyWarning, match="uncompiled"):
        y = model(x)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert forward.get_total_flops() == listed.flops == 2 * 24 * 70 * 40
    assert backward.get_total_flops() == 2 * listed.flops


@pytest.mark.slow
def test_the_weight_quantized_outside_the_graph_is_that_of_fprop() -> None:
    data = Data.wide(3)
    model = applied(fp4graph.load_policy("tetrajet-v2").phases[-1].policy, data)
    fc, runtime = model.blocks[1].fc, runtime_of(model)
    (weight,) = (each for each in runtime.weights if each.name == "blocks.1.fc.weight")
    norms = fc._fp4graph_out_control_norms.copy_(torch.from_numpy(np.random.default_rng(3).random(256)))
    got = weight_quantizer.quantize(weight, fc.weight.detach(), runtime.step)
    chosen, rest = chosen_channels(norms.double().numpy())
    assert np.array_equal(got[:, chosen].double().numpy(), mxfp8(data.w[:, chosen], 1))
    np.testing.assert_allclose(got[:, rest].double().numpy(), double_block(data.w[:, rest], 1), rtol=1e-6)
    apart = weight_quantizer.apart(weight)
    assert apart is not None
    assert apart.shape == (128, 256)
    assert sorted(apart[5].nonzero().flatten().tolist()) == sorted(chosen.tolist())


@pytest.mark.slow
def test_osci_reset_leaves_chosen_channels_alone() -> None:
    """The weights of all channels swing to and fro, so that NVFP4 would reset some in each of them."""
    more = ({"osci_reset": {"start": SPLIT, "every": 8, "track": 4, "threshold": 3.0}},)
    model, optimizer = started(in_phases(more=more), bias=False)
    optimizer.param_groups[0].update(lr=1.0, momentum=0.0)
    swing = torch.rand(40, 70, generator=torch.Generator().manual_seed(1)) * 0.02
    weights = []
    for number in range(SPLIT + 6):
        model(batch(number))
        model.fc.weight.grad = swing * (-1.0) ** number
        optimizer.step()
        weights.append(model.fc.weight.detach().clone())
    apart = torch.zeros(70, dtype=torch.bool)
    apart[torch.from_numpy(chosen_channels(model.fc._fp4graph_out_control_norms.double().numpy())[0].copy())] = True
    reset = torch.stack([(weights[i] - weights[i - 1]).abs() - swing for i in range(SPLIT, SPLIT + 6)]).abs() > 1e-6
    assert reset[..., ~apart].any()
    assert not reset[..., apart].any()


@pytest.mark.slow
def test_a_split_without_measured_norms_is_refused() -> None:
    model, optimizer = started(fp4graph.load_policy(in_phases()).phases[-1].policy)
    with pytest.raises(fp4graph.Error, match=r"input channels of fc\.weight, which were never measured.*mode: measure"):
        trained(model, optimizer, range(1))


def test_a_frozen_layer_beside_trained_ones_is_refused() -> None:
    """No step of the optimizer would add up its norms, and the first tenth of the channels would be chosen."""
    model, _ = started(in_phases())
    model.fc.requires_grad_(False)
    x = batch(0).requires_grad_()
    model(x).sum().backward()
    with pytest.raises(fp4graph.CaptureError, match=r"out_control chooses channels .* fc\.weight is frozen.*: train"):
        model(x)


@pytest.mark.slow
def test_a_call_with_nan_or_inf_measures_the_other_channels() -> None:
    model, optimizer = started(in_phases())
    trained(model, optimizer, range(MEASURE))
    x, expected = batch(MEASURE), norms_of(MEASURE)
    x[0, 3, 11], x[1, 2, 12], expected[[11, 12]] = torch.nan, torch.inf, 0
    model(x)
    recent = model.fc._fp4graph_out_control_fprop_input_recent.double().numpy()
    np.testing.assert_allclose(recent, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("channels", "multiple", "inputs", "count"),
    [
        (0.1, 1, 768, 77), (0.1, 1, 4096, 410), (0.1, 1, 4, 1), (0.1, 128, 768, 128), (0.1, 128, 4096, 512),
        (0.5, 1, 3, 2), (0.25, 16, 64, 16),
    ],
)  # fmt: skip
def test_the_number_of_channels(channels: float, multiple: int, inputs: int, count: int) -> None:
    """The share is rounded to nearest; multiples of 128 are as in the authors' code, ceil(int(0.1·4096) / 128) = 4."""
    options = {"mode": "split", "channels": channels, "multiple": multiple}
    (technique,) = loaded("out_control", options, quantize=NVFP4).rules[0].techniques
    assert technique.count(inputs) == count


@pytest.mark.slow
@pytest.mark.parametrize("operand", ["fprop.input", "fprop.weight"])
def test_a_layer_without_quantized_fprop_is_warned_about_and_trains_as_without_the_technique(operand: str) -> None:
    keep = {"operands": {operand: "keep"}}
    with pytest.warns(fp4graph.PolicyWarning, match=f"no effect here: {operand} stays in high precision"):
        fp4graph.load_policy(one_rule(WAIT, quantize=NVFP4, **keep))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp4graph.PolicyWarning)
        policies = in_phases(rule=keep), one_rule(quantize=NVFP4, **keep)
        assert_equal(*(trained(*started(policy), range(6)) for policy in policies))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "split", "message"),
    [
        (("q_ema",), {}, "q_ema keeps state of the whole weight; drop one of the two"),
        (("step_gradient",), {}, "differentiates the quantizers of fprop"),
        ((), {"multiple": 128}, "of 70 input channels 128 would be chosen"),
    ],
)
def test_a_later_phase_is_refused_before_training(more: tuple[Any, ...], split: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        fp4graph.apply(layer(), in_phases(more=more, **split), backend="eager")


@pytest.mark.slow
def test_the_refusal_names_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text("""version: 1
rules:
  - match: {op: linear}
    quantize: {element: e2m1, block: 16, scale: {format: e4m3}}
    techniques: [q_ema, {out_control: {mode: split}}]
""")
    with pytest.raises(CaptureError, match=r"p\.yaml:3: technique out_control .* q_ema"):
        fp4graph.apply(layer(), file, backend="eager")
