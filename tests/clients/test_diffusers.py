"""diffusers: a step of a U-Net and of a DiT as the training examples write it, with an average of weights."""

import pytest
import torch
import torch.nn.functional as F

from fp4graph.model.runtime import runtime_of
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, prepared

diffusers = pytest.importorskip("diffusers", reason="needs fp4graph[test]")
training_utils = pytest.importorskip("diffusers.training_utils", reason="needs fp4graph[test]")


def unet():
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=16, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        norm_num_groups=8, attention_head_dim=32, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


def dit():
    torch.manual_seed(0)
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=10, norm_num_groups=8, dropout=0.0,
    )  # fmt: skip


#: The U-Net's linears are in no repeated block, so this policy's rule matches all linears.
ATTENTION = one_rule(quantize={"element": "e2m1", "block": 32}, extends="tetrajet")


@pytest.mark.parametrize(("make", "policy"), [(unet, ATTENTION), (dit, "tetrajet")], ids=["unet", "dit"])
def test_train_and_average(make, policy, tmp_path, products, policy_warnings, watch_parameters):
    model, size = applied(make(), policy), 16 if make is unet else 8
    optimizer = prepared(model, lr=1e-3)
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=100)
    ema = training_utils.EMAModel(model.parameters(), decay=0.5, model_cls=type(model), model_config=model.config)
    changed = watch_parameters(model)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        clean, noise = (torch.randn(2, 4, size, size, generator=generator) for _ in range(2))
        times = torch.randint(0, 100, (2,), generator=generator)
        labels = {} if make is unet else {"class_labels": torch.tensor([1, 2])}
        predicted = model(scheduler.add_noise(clean, noise, times), times, **labels, return_dict=False)[0]
        loss = F.mse_loss(predicted[:, :4], noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.step(model.parameters())
    assert torch.isfinite(loss)
    assert len(products) >= 12
    # A DiT calls the first block's embedding of times a second time, for its output.
    assert all(count == (6 if "0.norm1.emb" in site else 3) for site, count in products.items())
    assert runtime_of(model).count == 3
    assert len(changed()) > len(products)

    ema.save_pretrained(tmp_path / "ema")
    model.save_pretrained(tmp_path / "model")
    for folder in ("ema", "model"):
        loaded = type(model).from_pretrained(tmp_path / folder)
        assert loaded.state_dict().keys() == make().state_dict().keys()
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    assert torch.equal(next(model.parameters()), ema.shadow_params[0])
    ema.restore(model.parameters())
    assert not policy_warnings()
