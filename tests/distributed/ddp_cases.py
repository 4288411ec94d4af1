"""Cases of models under DistributedDataParallel; test_cases.py runs them on two processes."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import fp4graph
from fp4graph.model import running, runtime
from tests.distributed.two_process_models import (
    MODELS,
    PHASED,
    PLAIN,
    accumulates,
    adapted,
    assert_close,
    falls,
    from_rank,
    gradients,
    image_loss,
    rank,
    same_on_both,
    state_of,
    train,
    vit,
)
from tests.distributed.two_processes import each
from tests.helpers.policies import NVFP4, one_rule, with_technique
from tests.helpers.steps import descend, differences
from tests.helpers.training import applied

FOLDER = Path()  # set by two_processes.py


@each(*product(("vit", "llama"), ("tetrajet", "tetrajet-qema")), ("mixture", "tetrajet-qema"), ("vit", "averaged"))
def case_trains(kind: str, policy: str) -> None:
    """The weights and moving averages of a mixture's experts have three axes. "averaged" has state, and phases."""
    make, loss_of = MODELS[kind]
    model = applied(make(), PHASED.get(policy, policy))
    losses = train(DDP(model), model, loss_of)
    assert falls(losses), losses
    assert same_on_both(state_of(model))  # parameters, moving averages, the count
    assert model._fp4graph_forwards == 6
    assert runtime.runtime_of(model).phase == (2 if policy in PHASED else 0)


def case_adapters_beside_packed_weights() -> None:
    """Pack before wrapping, after it or on the wrapper: the losses equal those of unpacked weights, to the bit."""
    runs = []
    for packed in ("never", "before", "inside", "wrapper"):
        model = applied(adapted(), "tetrajet")
        if packed == "before":
            fp4graph.pack_frozen(model)
        wrapper = DDP(model)
        if packed in ("inside", "wrapper"):
            fp4graph.pack_frozen(model if packed == "inside" else wrapper)
        assert ("blocks.0.mlp.fc1.weight" in dict(model.named_parameters())) == (packed == "never")
        runs.append(train(wrapper, model, image_loss, 4, 1e-2))
        assert same_on_both(state_of(model))
    assert runs[0] == runs[1] == runs[2] == runs[3]
    assert falls(runs[0]), runs[0]


def case_any_order_of_apply_and_ddp() -> None:
    """Apply before wrapping, after wrapping and on the wrapper: losses and state are the same, to the bit."""
    runs = []
    for order in ("before", "inside", "wrapper"):
        model = vit()
        if order == "before":
            applied(model, "tetrajet-qema")
        wrapper = DDP(model)
        if order == "inside":
            applied(wrapper.module, "tetrajet-qema")
        if order == "wrapper":
            assert applied(wrapper, "tetrajet-qema") is wrapper
        losses = train(wrapper, wrapper if order == "wrapper" else model, image_loss, steps=3)
        runs.append((losses, copy.deepcopy(state_of(model))))
    assert "blocks.0.attn.qkv._fp4graph_q_ema_weight" in runs[0][1]
    assert not differences(runs[0], runs[1])
    assert not differences(runs[0], runs[2])
    with fp4graph.bypass(wrapper), torch.no_grad():
        plain = wrapper(torch.ones(1, 3, 32, 32))
    assert fp4graph.explain(wrapper, "tetrajet", (torch.empty(1, 3, 32, 32),)).quantized == 8
    assert torch.equal(fp4graph.remove(wrapper)(torch.ones(1, 3, 32, 32)), plain)


@each(("vit", "microscaling"), ("llama", "mxfp4"))
def case_two_halves_have_the_gradients_of_the_whole(kind: str, policy: str) -> None:
    make, loss_of = MODELS[kind]
    wrapper = DDP(applied(make(), policy))
    loss_of(wrapper, rank()).backward()
    alone = applied(make(), policy)
    loss_of(alone, None).backward()
    assert_close(gradients(wrapper.module), gradients(alone), 3e-6)


def case_phases_begin_as_in_one_process() -> None:
    """In each phase, the gradients of two halves are those of the whole. No optimizer changes the weights."""
    wrapper = DDP(applied(vit(), PHASED["rounded"]))
    alone = applied(vit(), PHASED["rounded"])
    for phase in (0, 0, 1, 1, 2, 2):
        image_loss(wrapper, rank()).backward()
        image_loss(alone, None).backward()
        assert runtime.runtime_of(wrapper.module).phase == runtime.runtime_of(alone).phase == phase
        assert_close(gradients(wrapper.module), gradients(alone), 3e-6)  # the order of sums
        wrapper.zero_grad()
        alone.zero_grad()


def case_channels_are_measured_on_all_ranks() -> None:
    """The norms on both ranks are the sums of those that each rank measures alone. ``lr=0.0`` keeps the weights."""
    model, alone = (applied(vit(), PHASED["parted"]) for _ in range(2))
    train(DDP(model), model, image_loss, steps=4, lr=0.0)
    train(alone, alone, image_loss, steps=4, lr=0.0)
    norms, own = ({n: v for n, v in state_of(m).items() if n.endswith("out_control_norms")} for m in (model, alone))
    assert len(norms) == 8
    assert same_on_both(norms)
    assert same_on_both(own) is (rank() == 0)  # ranks have different images; rank 0 is compared with itself
    for value in own.values():
        dist.all_reduce(value)
    assert_close(norms, own, 1e-6)


def case_graphs_are_cut_along_buckets_after_the_pass() -> None:
    runs = {}
    for bucket in (25, 0.05):
        parts = []

        def eager(gm, inputs, parts=parts):
            parts.append(gm)
            return gm.forward

        with mock.patch.object(running, "inner_backend", return_value=eager):
            model = applied(vit(), "tetrajet-qema")
            runs[bucket] = train(DDP(model, bucket_cap_mb=bucket), model, image_loss, steps=3)
        assert (len(parts) > 2) is (bucket < 1), len(parts)
        assert sum(site.quantized for site in runtime.runtime_of(model).sites) == 8
    assert runs[25] == runs[0.05]


def case_checkpointed_blocks_under_aot_eager() -> None:
    losses = []
    for checkpointed in (False, True):
        model = vit(depth=1)
        model.set_grad_checkpointing(checkpointed)
        fp4graph.apply(model, "tetrajet-q1", backend="aot_eager" if checkpointed else "eager")
        losses.append(train(DDP(model, bucket_cap_mb=0.05), model, image_loss, steps=2))
    assert losses[0] == losses[1]


def local_gradients(policy: object, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the gradients of this rank alone, on data that both ranks share."""
    wrapper = DDP(applied(vit(), policy, seed=seed))
    with wrapper.no_sync():
        image_loss(wrapper, 0).backward()
    return gradients(wrapper.module)


def case_ranks_draw_different_noise() -> None:
    mine = local_gradients("tetrajet")
    name = "blocks.0.attn.qkv.weight"
    assert not torch.equal(from_rank(mine[name], 0), from_rank(mine[name], 1))
    assert not differences(mine, local_gradients("tetrajet"))
    assert not torch.equal(mine[name], local_gradients("tetrajet", seed=1)[name])


@each(("never", True), ("step", False))
def case_only_constant_noise_is_the_same_on_all_ranks(resample: str, same: bool) -> None:
    hadamard = {"hadamard": {"block": 32, "kind": "random", "resample": resample}}
    mine = local_gradients(one_rule(hadamard, match={"op": "linear", "block": True}))["blocks.0.attn.qkv.weight"]
    assert torch.equal(from_rank(mine, 0), from_rank(mine, 1)) is same


def case_checkpoint() -> None:
    """A test loads the file in a single process; the state of the second rank is the same to the bit."""
    model = applied(vit(), "tetrajet-qema")
    train(DDP(model), model, image_loss, steps=2)
    assert same_on_both(state_of(model))
    if rank() == 0:
        torch.save(model.state_dict(), FOLDER / "whole.pt")


#: The average begins in the second phase.
LATER = one_rule(quantize=PLAIN, phases=[{"at": 2, "rules": with_technique("q_ema", quantize=PLAIN)["rules"]}])
HELD = with_technique("tensor_scaling", {"hold_steps": 4}, quantize=NVFP4)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.fc(x))


def case_buffers_of_fp4graph_are_left_out_of_the_broadcast() -> None:
    torch.manual_seed(0)
    model = applied(Normalized(), with_technique("q_ema", quantize=PLAIN))
    wrapper = DDP(model, broadcast_buffers=True)
    broadcast = {id(buffer) for buffer in wrapper.modules_buffers}
    for name, buffer in model.named_buffers():
        assert (id(buffer) in broadcast) == ("_fp4graph" not in name), name
    fp4graph.prepare_optimizer(wrapper, torch.optim.SGD(wrapper.parameters(), lr=0.1))
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank()))
    wrapper(x).square().sum().backward()
    model.fc._fp4graph_q_ema_weight += rank()
    for count in (2, 3):
        wrapper(x).square().sum().backward()
        assert model._fp4graph_forwards == count
        assert runtime.runtime_of(model).root_state.count == count
        assert torch.equal(from_rank(model.norm.num_batches_tracked), model.norm.num_batches_tracked)
    difference = from_rank(model.fc._fp4graph_q_ema_weight, 1) - from_rank(model.fc._fp4graph_q_ema_weight, 0)
    torch.testing.assert_close(difference, torch.ones_like(difference))


@each(*product(("before", "inside", "wrapper"), (0, 1)))
def case_held_scales_stay_on_their_rank(order: str, phase: int) -> None:
    """DDP sends the buffers of BatchNorm at every forward, but no scale, whenever the scale joined the model."""
    policy = one_rule(quantize=NVFP4, phases=[{"at": 1, "rules": HELD["rules"]}]) if phase else HELD
    torch.manual_seed(0)
    model = Normalized()
    if order == "before":
        applied(model, policy)
    wrapper = DDP(model)
    if order != "before":
        applied(wrapper if order == "wrapper" else model, policy)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(rank()))
    for _ in range(6):
        wrapper(x).square().sum().backward()
    scale = model.state_dict()["fc._fp4graph_tensor_scaling_wgrad_grad_output_gamma"]
    assert not torch.equal(from_rank(scale, 0), from_rank(scale, 1))


def case_accumulation_under_no_sync() -> None:
    """Each accumulated forward counts, and draws its own noise."""
    model = applied(vit(), "microscaling")
    wrapper = DDP(model)
    accumulates(wrapper, wrapper.no_sync)
    assert model._fp4graph_forwards == 2

    noisy, images, both = DDP(applied(vit(), "tetrajet")), torch.randn(2, 3, 32, 32), []
    for _ in range(2):
        noisy.zero_grad()
        with noisy.no_sync():
            noisy(images).square().mean().backward()
        both.append(gradients(noisy.module)["blocks.0.mlp.fc1.weight"])
    assert not torch.equal(*both)


def case_state_starts_at_the_weights_that_ddp_sends() -> None:
    torch.manual_seed(rank())
    model = vit()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * rank())
    applied(model, "tetrajet-qema")
    image_loss(DDP(model), rank())
    qkv = model.blocks[0].attn.qkv
    assert same_on_both({"weight": qkv.weight})
    assert torch.equal(qkv._fp4graph_q_ema_weight, qkv.weight)


@each(*product(("tetrajet-qema", "averaged", "averaged later")))
def case_a_checkpoint_that_rank_0_alone_loads_reaches_all(policy: str) -> None:
    """The count says which phase begins. "averaged" is in its second phase, "averaged later" has no state before."""
    policy = {**PHASED, "averaged later": LATER}.get(policy, policy)
    trained = applied(vit(), policy)
    train(trained, trained, lambda model, _: image_loss(model, 0), steps=3)
    model = applied(vit(), policy)
    if rank() == 0:
        model.load_state_dict(trained.state_dict())
        runtime.runtime_of(model).count_from(3)  # which an optimizer's state would carry
    wrapper = DDP(model)
    fp4graph.prepare_optimizer(model, torch.optim.SGD(wrapper.parameters(), lr=0.1))
    image_loss(wrapper, rank()).backward()
    assert same_on_both(state_of(model))
    assert model._fp4graph_forwards == 4
    ema = "blocks.1.mlp.fc2._fp4graph_q_ema_weight"
    assert torch.equal(model.state_dict()[ema], from_rank(trained.state_dict()[ema]))


def case_ranks_that_end_apart_enter_phases_apart() -> None:
    """Under ``join`` a rank enters a phase while the other has ended, or is in the phase before."""
    model = applied(vit(depth=1), LATER)
    wrapper = DDP(model)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(wrapper.parameters(), lr=0.01))
    phases = []
    for _ in range(2):
        with wrapper.join():
            descend(lambda: image_loss(wrapper, rank()), optimizer, 3 - rank())
        phases.append(runtime.runtime_of(model).phase)
        assert same_on_both(dict(model.named_parameters()))
    assert phases == ([1, 1] if rank() == 0 else [0, 1])
    assert model._fp4graph_forwards == 6 - 2 * rank()


def case_one_rank_may_evaluate_alone() -> None:
    model = applied(vit(), "tetrajet-qema")
    wrapper = DDP(model)
    if rank() == 0:
        with torch.no_grad():
            image_loss(wrapper.eval(), 0)
    assert torch.tensor(train(wrapper.train(), model, image_loss, steps=2)).isfinite().all()
    dist.barrier()
