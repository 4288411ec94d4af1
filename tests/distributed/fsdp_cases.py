"""Cases of models under FSDP2 (``fully_shard``); test_cases.py runs them on two processes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint as recompute

import fp4graph
from fp4graph.model.coverage import served_sites
from fp4graph.model.runtime import runtime_of
from fp4graph.model.weight_quantizer import quantize
from tests.distributed.two_process_models import (
    MODELS,
    PHASED,
    PLAIN,
    accumulates,
    adapted,
    assert_close,
    falls,
    gradients,
    image_loss,
    llama,
    mixture,
    rank,
    state_of,
    train,
    vit,
    whole,
)
from tests.distributed.two_processes import each
from tests.helpers.policies import NVFP4, one_rule, with_technique
from tests.helpers.steps import differences
from tests.helpers.training import applied

FOLDER = Path()  # set by two_processes.py
ORDERS = ("apply", "shard")
EMA = "blocks.0.attn.qkv._fp4graph_q_ema_weight"


def shard(model: nn.Module, **options: object) -> nn.Module:
    """Shard each block, then the rest."""
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks if hasattr(model, "blocks") else model.model.layers:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def sharded(model: nn.Module, policy: object, *, first: str = "apply", **options: object) -> nn.Module:
    if first == "apply":
        return shard(applied(model, policy), **options)
    return applied(shard(model, **options), policy)


def quantized(model: nn.Module) -> int:
    """Return the number of quantized sites, with those of modules that run another module's graph."""
    return sum(site.quantized * len(names) for site, names in served_sites(model, runtime_of(model).capture))


@cache
def six_losses(kind: str, policy: str) -> list[float]:
    make, loss_of = MODELS[kind]
    model = applied(make(), PHASED.get(policy, policy))
    return train(DDP(model), model, loss_of, 6)


def ddp_losses(kind: str, policy: str, steps: int = 6) -> list[float]:
    return six_losses(kind, policy)[:steps]


@each(("tetrajet",), ("tetrajet-qema",))
def case_another_policy_on_a_sharded_model(first: str) -> None:
    """The first loss is DDP's, to the bit; later losses have other noise, because the count of forwards goes on."""
    model = sharded(vit(), first)
    image_loss(model, rank()).backward()
    model.zero_grad()
    applied(model, "tetrajet-qema")
    losses = train(model, model, image_loss)
    assert losses[0] == ddp_losses("vit", "tetrajet-qema", 1)[0]
    assert falls(losses), losses


@each(
    ("vit", "tetrajet", 8),
    ("vit", "tetrajet-qema", 8),
    ("vit", "ue5m3-d50", 8, "apply"),
    ("llama", "tetrajet", 14, "apply"),
    ("llama", "tetrajet-qema", 14, "shard"),
    ("mixture", "tetrajet", 12, "apply"),
    ("mixture", "tetrajet-qema", 12, "shard"),
    ("llama", "nvfp4-qad-lsq", 14, "apply"),
    ("mixture", "nvfp4-qad-lsq", 12, "shard"),
)
def case_trains(kind: str, policy: str, sites: int, *orders: str) -> None:
    """Losses are DDP's, to the bit, so noise and held scales are the same too."""
    make, loss_of = MODELS[kind]
    expected = ddp_losses(kind, policy)
    assert falls(expected), expected
    for first in orders or ORDERS:
        model = sharded(make(), policy, first=first)
        assert train(model, model, loss_of) == expected, first
        assert quantized(model) == sites
        assert model._fp4graph_forwards == 6
        assert all(isinstance(p, DTensor) for p in model.parameters())


@each(*product(ORDERS))
def case_siblings_share_a_scale(first: str) -> None:
    """The largest weight of a group of siblings may be on another rank."""
    shared = one_rule({"tensor_scaling": {"share": "siblings"}}, quantize=NVFP4)
    make, loss_of = MODELS["llama"]
    expected = train(DDP(copied := applied(make(), shared)), copied, loss_of)
    own = applied(make(), one_rule("tensor_scaling", quantize=NVFP4))
    assert train(DDP(own), own, loss_of) != expected
    model = sharded(make(), shared, first=first)
    assert train(model, model, loss_of) == expected


@each(*product(PHASED, ORDERS))
def case_phases(policy: str, first: str) -> None:
    """Losses are DDP's, to the bit, through three phases; each phase captures its modules anew."""
    model = sharded(vit(), PHASED[policy], first=first)
    assert train(model, model, image_loss) == ddp_losses("vit", policy)
    assert runtime_of(model).phase == 2


def case_adapters_beside_packed_weights() -> None:
    """Weights packed before fully_shard give DDP's losses, to the bit. Packing later, or a cast, is an error."""
    alone = applied(adapted(), "tetrajet")
    expected = train(DDP(alone), alone, image_loss, 4, 1e-2)
    model = sharded(adapted(), "tetrajet")
    assert train(model, model, image_loss, 4, 1e-2) == expected
    with pytest.raises(fp4graph.Error, match=r"blocks\.0\.attn\.qkv\..*weight is sharded.*before fully_shard"):
        fp4graph.pack_frozen(model)
    packed = fp4graph.pack_frozen(applied(adapted(), "tetrajet"))
    shard(packed)
    assert all(isinstance(p, DTensor) for p in packed.parameters())
    assert "blocks.0.mlp.fc1.weight" not in dict(packed.named_parameters())
    assert train(packed, packed, image_loss, 4, 1e-2) == expected
    cast = fp4graph.pack_frozen(applied(adapted(), "tetrajet"))
    shard(cast, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(fp4graph.Error, match=r"^blocks\.0\..* was packed in torch.float32, .* computes in torch.bf"):
        image_loss(cast, rank())


@each(("vit",), ("llama",))
def case_two_halves_have_the_gradients_of_the_whole(kind: str) -> None:
    """A mixture is left out: the halves of an expert's tokens have other blocks than the whole."""
    make, loss_of = MODELS[kind]
    model = sharded(make(), "microscaling")
    loss_of(model, rank()).backward()
    alone = applied(make(), "microscaling")
    loss_of(alone, None).backward()
    assert_close(gradients(model), gradients(alone), 3e-6)


def case_state_is_sharded_as_its_weight() -> None:
    single = applied(vit(), "tetrajet-qema")
    train(DDP(single), single, image_loss, 3)
    for first in ORDERS:
        model = sharded(vit(), "tetrajet-qema", first=first)
        train(model, model, image_loss, 3)
        ema, weight = model.get_buffer(EMA), model.blocks[0].attn.qkv.weight
        assert ema.placements == weight.placements
        assert ema.to_local().numel() == weight.numel() // 2
        assert torch.equal(whole(ema), single.get_buffer(EMA))
        assert ema.dtype is torch.float32


def case_a_sharded_weight_quantized_outside_the_graph() -> None:
    """Techniques see this value in the optimizer's step."""
    model = sharded(vit(), "tetrajet-qema")
    train(model, model, image_loss, 1)
    runtime = runtime_of(model)
    weight = next(w for w in runtime.weights if w.name == "blocks.1.mlp.fc1.weight")
    result = quantize(weight, weight.parameter, runtime.step)
    assert result.placements == weight.parameter.placements
    alone = applied(vit(), "tetrajet-qema")
    set_model_state_dict(alone, {name: whole(value) for name, value in state_of(model).items()}, options=lenient())
    same = next(w for w in runtime_of(alone).weights if w.name == weight.name)
    assert torch.equal(whole(result), quantize(same, same.parameter, runtime.step))


def lenient() -> StateDictOptions:
    return StateDictOptions(strict=False)


def case_checkpoint() -> None:
    model = sharded(vit(), "tetrajet-qema")
    train(model, model, image_loss, 2)
    # The state that torch returns may be the model's tensors, which the next steps change.
    state = copy.deepcopy(get_model_state_dict(model))
    assert isinstance(state[EMA], DTensor)
    full = copy.deepcopy(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)))
    if rank() == 0:
        torch.save(full, FOLDER / "whole.pt")
    expected = image_loss(model, rank())
    for first in ORDERS:
        for saved, options in (
            (state, None),
            (full, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)),
        ):
            other = sharded(vit(), "tetrajet-qema", first=first)
            if first == "apply" and options is None:
                image_loss(other, rank())  # state is sharded at the first forward
            set_model_state_dict(other, dict(saved), options=options)
            runtime_of(other).count_from(2)  # which an optimizer's state would carry
            fp4graph.prepare_optimizer(other, torch.optim.SGD(other.parameters(), lr=0.1))
            assert torch.equal(image_loss(other, rank()), expected)


def case_coverage_counts_every_block() -> None:
    for least, raises in ((8, nullcontext()), (9, pytest.raises(fp4graph.PolicyError, match="9"))):
        policy = {"version": 1, "extends": "microscaling", "name": "p", "expect": {"quantized": {"min": least}}}
        with raises:
            image_loss(sharded(vit(), policy), rank())


def case_rules_by_place_are_kept_apart() -> None:
    """Blocks of one class share a graph only where the same rules hold for them."""
    policy = one_rule(quantize=PLAIN, match={"op": "linear", "block": True})
    policy["rules"].insert(0, {"name": "first", "match": {"first_blocks": 1}, "keep": "first"})
    model = sharded(vit(depth=3), policy)
    image_loss(model, rank()).backward()
    served = served_sites(model, runtime_of(model).capture)
    names = {name for site, modules in served if site.quantized for name in modules}
    assert {name.split(".")[1] for name in names} == {"1", "2"}
    assert len(names) == 8
    alone = applied(vit(depth=3), policy)
    image_loss(alone, None).backward()
    assert_close(gradients(model), gradients(alone), 3e-6)


def case_other_ways_to_shard() -> None:
    """Shard the root alone, each linear by itself, or with weights whole after the forward: losses are the same."""
    expected = ddp_losses("vit", "tetrajet-qema", 3)
    mesh = init_device_mesh("cpu", (2,))

    def each_linear(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)

    ways = (lambda m: fully_shard(m, mesh=mesh), each_linear, lambda m: shard(m, reshard_after_forward=False))
    for way in ways:
        model = applied(vit(), "tetrajet-qema")
        way(model)
        assert train(model, model, image_loss, 3) == expected
        assert quantized(model) == 8


def case_a_sharded_container_and_names_that_repeat() -> None:
    """Dynamo starts no graph in the forward of torch's modules, and "0" of the inner one is not "0" of the root."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)))
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    # The root, torch's Sequential, calls "0", and FSDP's hooks on "1" leave the root without a graph. Dynamo starts a
    # graph in the call that an applied model gives its parts.
    for module, expected in (("1.*", {"1.0", "1.2"}), ("*", {"0", "1.0", "1.2"})):
        policy = one_rule(quantize=PLAIN, match={"op": "linear", "module": module})
        applied(model, policy)
        model(torch.randn(32, 64)).sum().backward()
        assert {site.module for site in runtime_of(model).sites if site.quantized} == expected


def case_recomputed_activations() -> None:
    """The backward runs the compiled blocks again, with the noise of the forward."""
    expected = ddp_losses("vit", "tetrajet-qema", 3)
    model = applied(vit(), "tetrajet-qema")
    for block in model.blocks:
        checkpoint(block)
    shard(model)
    assert train(model, model, image_loss, 3) == expected
    model = vit()
    model.set_grad_checkpointing(True)
    sharded(model, "tetrajet-qema")
    assert train(model, model, image_loss, 3) == expected


class Unnamed(nn.Module):
    """Multiplies with the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(nn.functional.linear(x, self.first.weight, self.first.bias)))


class Unnameds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.top = nn.Sequential(Unnamed(), Unnamed(), Unnamed()), Unnamed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.top(self.blocks(x))


@each(*product(ORDERS, (False, True)))
def case_weights_of_layers_that_are_not_called(first: str, whole_model: bool) -> None:
    """Noise and averages are DDP's, and the blocks share a graph."""
    policy = with_technique("q_ema", quantize=PLAIN, operands={"backward": {"rounding": "stochastic"}})
    x, states = torch.randn(16, 32, generator=torch.Generator().manual_seed(rank())).requires_grad_(), []
    for wrap in (DDP, fully_shard):
        torch.manual_seed(0)
        model = Unnamed() if whole_model else Unnameds()
        if first == "apply":
            applied(model, policy)
        for block in () if whole_model or wrap is DDP else model.blocks:
            fully_shard(block)
        run = wrap(model)
        if first == "shard":
            applied(model, policy)
        train(run, model, lambda model, _: model(x).square().mean(), 3)
        states.append({name: whole(value) for name, value in state_of(model).items()})
    assert not differences(*states)
    assert len(runtime_of(model).sites) == (2 if whole_model else 4)


def case_a_product_behind_a_sharded_child_is_refused() -> None:
    """The child's hooks break the graph that has the key of the root."""
    model = nn.Sequential(nn.Linear(32, 32), Unnamed())
    applied(model, one_rule(quantize=NVFP4 | {"rounding": "stochastic"}))
    fully_shard(model[0])
    fully_shard(model[1].second)
    fully_shard(model)
    with pytest.raises(fp4graph.CaptureError, match=r"Under fully_shard .* move the product into a module of its own"):
        model(torch.randn(16, 32))


class Repeated(nn.Module):
    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.block, self.recomputes = nn.Sequential(nn.Linear(32, 32), nn.Tanh()), recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = recompute(self.block, x, use_reentrant=False) if self.recomputes else self.block(x)
        return x


def case_recomputed_repeats() -> None:
    """A block that runs several times in a forward is recomputed with the noise of each run."""
    policy, found = one_rule(quantize=NVFP4 | {"rounding": "stochastic"}), []
    for recomputes in (False, True):
        torch.manual_seed(0)
        model = applied(Repeated(recomputes), policy)
        fully_shard(model.block)
        fully_shard(model)
        y = model(torch.randn(8, 32, generator=torch.Generator().manual_seed(rank())))
        y.square().sum().backward()
        found.append((y.detach(), whole(model.block[0].weight.grad)))
    assert not differences(*found)


def case_mixed_precision_keeps_the_average_in_fp32() -> None:
    model = sharded(vit(), "tetrajet-qema", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    assert falls(train(model, model, image_loss))
    assert model.get_buffer(EMA).dtype is torch.float32


def case_accumulation_without_sync() -> None:
    model = sharded(vit(), "microscaling")

    @contextmanager
    def unsynced() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        yield
        model.set_requires_gradient_sync(True)
        model.set_reshard_after_backward(True)

    accumulates(model, unsynced)


def case_stable_spam_where_a_rank_has_no_part_of_a_parameter() -> None:
    """The position embedding has one row, which is on the first rank."""
    policy, losses = one_rule(quantize=PLAIN, techniques=["stable_spam"]), []
    for wrap in (DDP, shard):
        model = applied(vit(), policy)
        losses.append(train(wrap(model), model, image_loss, 3))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def case_a_step_while_weights_are_whole() -> None:
    model = sharded(vit(), "tetrajet-qema")
    model.set_reshard_after_backward(False)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=1.0))
    image_loss(model, rank()).backward()
    optimizer.step()
    model.set_reshard_after_backward(True)
    for unit in (*model.blocks, model):
        unit.reshard()
    weight = model.blocks[0].attn.qkv.weight
    assert not torch.equal(whole(model.get_buffer(EMA)), whole(weight))
    image_loss(model, rank()).backward()


def case_built_on_the_meta_device() -> None:
    """State, count and keys are right whether apply() came before or after sharding: state starts at a forward."""
    keys = []
    for first in ORDERS:
        with torch.device("meta"):
            model = sharded(vit(), "tetrajet-qema", first=first)
        model.to_empty(device="cpu")
        source = vit().state_dict()
        set_model_state_dict(model, dict(source), options=StateDictOptions(full_state_dict=True, strict=False))
        image_loss(model, rank())
        assert torch.equal(whole(model.get_buffer(EMA)), source["blocks.0.attn.qkv.weight"])
        assert model._fp4graph_forwards == 1
        keys.append(model.blocks[0].attn.qkv._fp4graph_key)
    assert torch.equal(*keys)
    assert torch.equal(keys[0], applied(vit(), "tetrajet").blocks[0].attn.qkv._fp4graph_key)


def case_bypass_and_remove() -> None:
    model = sharded(vit(), "tetrajet-qema")
    image_loss(model, rank())
    plain = shard(vit())
    with fp4graph.bypass(model):
        assert torch.equal(image_loss(model, rank()), image_loss(plain, rank()))
    fp4graph.remove(model)
    assert torch.equal(image_loss(model, rank()), image_loss(plain, rank()))
    assert not any("forward" in module.__dict__ for module in model.modules())
    applied(model, "microscaling")
    image_loss(model, rank()).backward()


def case_tensor_parallelism_is_refused() -> None:
    plain, mesh = nn.Sequential(nn.Linear(64, 64)), init_device_mesh("cpu", (2,))
    model = parallelize_module(plain, mesh, {"0": ColwiseParallel()})
    applied(model, one_rule(quantize=PLAIN))
    with pytest.raises(fp4graph.CaptureError, match="tensor parallelism"):
        model(torch.randn(32, 64))


def case_a_loop_over_experts_is_refused() -> None:
    model, ids = mixture(), torch.randint(0, 97, (2, 16))
    model.config._experts_implementation = "eager"
    model = sharded(model, "tetrajet")
    for _ in range(2):
        with pytest.raises(fp4graph.CaptureError, match=r"mlp\.experts: .*not captured.*grouped_mm"):
            model(ids)


@each(("apply",), ("wrap",))
def case_fsdp1_is_refused(first: str) -> None:
    model = vit() if first == "wrap" else applied(vit(), "microscaling")
    wrapper = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    if first == "wrap":
        applied(model, "microscaling")
    with pytest.raises(fp4graph.Error, match="fully_shard"):
        image_loss(wrapper, rank())


def case_llama_of_another_dtype() -> None:
    model = sharded(llama().bfloat16(), "tetrajet-qema", first="shard")
    assert falls(train(model, model, MODELS["llama"][1], 4, lr=1e-2))
