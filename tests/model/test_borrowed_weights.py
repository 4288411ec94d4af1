"""A module that multiplies with the weight of another, without calling it, trains as if it had called it."""

from __future__ import annotations

import pytest
import timm
import torch
import torchvision
import yaml
from torch import nn
from torch.nn import functional as F

import fp4graph

pytestmark = pytest.mark.slow


class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Borrows(Calls):
    def forward(self, x):
        hidden = F.linear(self.norm(x), self.first.weight, self.first.bias)
        return x + torch.addmm(self.second.bias, F.gelu(hidden), self.second.weight.t())


def trained(model, x, policy, stance="default", steps=3):
    fp4graph.apply(model, policy, backend="eager", seed=1)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    seen = []
    for _ in range(steps):
        with torch.compiler.set_stance(stance):
            y = model(*x)
        y.square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(value.clone() for value in model.state_dict().values())]


@pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema", "tetrajet-qramping", "tetrajet-dampen"])
def test_borrowing_is_calling(policy):
    def made(block):
        torch.manual_seed(0)
        return nn.Sequential(block(), block())

    x = (torch.randn(8, 64, generator=torch.Generator().manual_seed(0)),)
    expected = trained(made(Calls), x, policy)
    for stance in ("default", "force_eager"):
        results = trained(made(Borrows), x, policy, stance)
        assert all(map(torch.equal, results, expected))


@pytest.mark.inductor
def test_all_borrowed_weights_are_marked_at_once():
    torch._dynamo.utils.counters.clear()
    trained(nn.Sequential(*(Borrows() for _ in range(4))), (torch.randn(8, 64),), "tetrajet-qema", steps=1)
    assert torch._dynamo.utils.counters["frames"]["total"] == 2


class Gated(Calls):
    """Multiplies with a matrix that is the weight of no layer, as SwiftFormer and MViTv2 do."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.randn(64, 64))

    def forward(self, x):
        return super().forward(x @ self.gate)


@pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("stance", ["default", "force_eager"])
def test_a_technique_with_state_asks_to_keep_a_matrix_that_is_no_weight(stance):
    def made():
        return nn.Sequential(Gated(), Gated())

    x = (torch.randn(8, 64),)
    policy = {"version": 1, "name": "kept", "extends": "tetrajet-qema", "rules": {"before": []}}
    for number in range(2):  # each error asks for a rule for the module that it names, and no more
        with pytest.raises(
            fp4graph.CaptureError, match=r"q_ema keeps .* parameter 'gate', the weight of no layer"
        ) as error:
            trained(made(), x, policy if number else "tetrajet-qema", stance)
        rule = yaml.safe_load(str(error.value).partition("[...]}'): ")[2])
        policy["rules"]["before"].append(rule | {"name": f"gate-{number}"})
    trained(made(), x, policy, stance)


def beit():
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 10}
    return timm.create_model("beit_base_patch16_224", **sizes)


def eva02():
    sizes = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 64, "num_heads": 2, "num_classes": 10}
    return timm.create_model("eva02_tiny_patch14_224", **sizes)


def swin_v2():
    sizes = {"img_size": 32, "window_size": 4, "embed_dim": 32, "depths": (2, 2), "num_heads": (2, 4)}
    return timm.create_model("swinv2_tiny_window8_256", num_classes=10, **sizes)


def torchvision_swin():
    return torchvision.models.SwinTransformer([4, 4], 32, [2, 2], [2, 4], [4, 4], num_classes=10)


def encoder_and_decoder():
    return nn.Transformer(64, 2, 1, 2, 128, dropout=0.0, batch_first=True)


@pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("policy", ["tetrajet-qema", pytest.param("tetrajet", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "make",
    [beit, eva02, *(pytest.param(m, marks=pytest.mark.long) for m in (swin_v2, torchvision_swin)), encoder_and_decoder],
)
def test_models_that_borrow_train(make, policy):
    shape = (2, 8, 64) if make is encoder_and_decoder else (2, 3, 32, 32)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)),) * (1 + (make is encoder_and_decoder))
    results = []
    for stance in ("default", "force_eager"):
        torch.manual_seed(0)
        model = make()
        for module in model.modules():
            if "Drop" in type(module).__name__ or "StochasticDepth" in type(module).__name__:
                module.p = module.drop_prob = 0.0
        results.append(trained(model, x, policy, stance, steps=2))
    assert all(map(torch.equal, *results))
