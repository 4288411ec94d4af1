"""Models, data and comparisons of the cases that run on two processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fp4graph
from tests.helpers import mixtures, models
from tests.helpers.models import llama
from tests.helpers.steps import descend

Loss = Callable[[nn.Module, int], Tensor]
PLAIN = {"element": "e2m1", "block": 32}


def vit(**options: object) -> nn.Module:
    """Make a ViT of two blocks without class token: two images are 32 tokens, one block of a scale."""
    return models.vit(**{"class_token": False, "global_pool": "avg", **options})


def mixture() -> nn.Module:
    """Make a Qwen3-MoE of two layers, whose four experts are grouped products."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    model: nn.Module = mixtures.mixture(num_hidden_layers=2, max_position_embeddings=32, use_cache=False, **heads)
    return model


def adapted() -> nn.Module:
    """Make the ViT, frozen but for LoRA at two layers of each block and for the head."""
    from tests.model.test_adapters import Lora

    model = vit()
    torch.manual_seed(1)
    for block in model.blocks:
        block.attn.qkv, block.mlp.fc2 = Lora(block.attn.qkv), Lora(block.mlp.fc2)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or name.startswith("head"))
    return model


def rank() -> int:
    return dist.get_rank()


def of_both(make: Callable[[torch.Generator], Tensor], part: int | None) -> Tensor:
    """Return the data of rank ``part``; for None, of both ranks, one after the other."""
    halves = [make(torch.Generator().manual_seed(100 + seed)) for seed in range(2)]
    return torch.cat(halves) if part is None else halves[part]


def image_loss(model: nn.Module, part: int | None) -> Tensor:
    images = of_both(lambda g: torch.randn(8, 3, 32, 32, generator=g), part)
    labels = of_both(lambda g: torch.randint(10, (8,), generator=g), part)
    return cross_entropy(model(images), labels)


def text_loss(model: nn.Module, part: int | None) -> Tensor:
    tokens = of_both(lambda g: torch.randint(97, (2, 16), generator=g), part)
    return model(input_ids=tokens, labels=tokens).loss


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int | None], Tensor]]] = {
    "vit": (vit, image_loss),
    "llama": (llama, text_loss),
    "mixture": (mixture, text_loss),
}


#: The backward is exact from the third forward on; nothing is quantized from the fifth on.
PHASES = [{"at": 2, "operands": {"backward": "keep"}}, {"at": 4, "rules": [], "default": "keep"}]


def _linears(mode: str) -> list[dict[str, object]]:
    quantize = {"element": "e2m1", "block": 32, "scale": {"format": "e8m0"}}
    match = {"op": "linear", "block": True}
    techniques = [{"out_control": {"mode": mode}}, {"osci_reset": {"every": 4, "track": 1}}]  # resets at step 6
    return [{"name": "linears", "match": match, "quantize": quantize, "techniques": techniques}]


#: Policies in phases; "rounded" draws no noise, "averaged" keeps state and draws it, "parted" measures activations.
PHASED: dict[str, dict[str, object]] = {
    "parted": {
        "version": 1,
        "name": "parted",
        "rules": _linears("wait"),
        "phases": [{"at": 2, "rules": _linears("measure")}, {"at": 4, "rules": _linears("split")}],
    },
    "rounded": {"version": 1, "name": "rounded", "extends": "microscaling", "phases": PHASES},
    "averaged": {"version": 1, "name": "averaged", "extends": "tetrajet-qema", "phases": PHASES},
}


def train(run: nn.Module, model: nn.Module, loss_of: Loss, steps: int = 6, lr: float = 5e-3) -> list[float]:
    """Return this rank's losses in steps of AdamW on one batch; ``run`` is called, ``model`` holds the policy."""
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(run.parameters(), lr=lr))
    return descend(lambda: loss_of(run, rank()), optimizer, steps)


def falls(losses: list[float]) -> bool:
    return all(map(torch.isfinite, torch.tensor(losses))) and min(losses[-2:]) < 0.85 * losses[0]


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


def from_rank(tensor: Tensor, source: int = 0) -> Tensor:
    """Return the value that ``tensor`` has on rank ``source``."""
    received = tensor.detach().clone()
    dist.broadcast(received, source)
    return received


def same_on_both(tensors: dict[str, Tensor]) -> bool:
    """Return whether both ranks hold the same values, to the bit."""
    equal = [torch.equal(from_rank(tensor), tensor) for tensor in tensors.values()]  # every rank takes part in each
    return all(equal)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def accumulates(run: nn.Module, unsynced: Callable[[], AbstractContextManager[object]]) -> None:
    """Compare the gradients of two accumulated quarters of a batch on each of two ranks with those of the batch."""
    images = torch.randn(8, 3, 32, 32)
    mine = images[4 * rank() : 4 * rank() + 4]
    with unsynced():
        (run(mine[:2]).square().mean() / 2).backward()
    (run(mine[2:]).square().mean() / 2).backward()
    alone = fp4graph.apply(vit(), "microscaling", backend="eager")
    alone(images).square().mean().backward()
    assert_close(gradients(getattr(run, "module", run)), gradients(alone), 3e-6)


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Compare every tensor, within ``tolerance`` times the amax of the expected tensor."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        error = ((got[name] - value).abs().max() / value.abs().max().clamp_min(1e-12)).item()
        assert error <= tolerance, f"{name}: {error}"
