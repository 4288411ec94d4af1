"""CLIP of open_clip and of transformers: two encoders, called by their own methods."""

import pytest
import torch
import transformers

from fp4graph.model.runtime import runtime_of
from tests.helpers.steps import descend, same
from tests.helpers.training import applied, prepared

open_clip = pytest.importorskip("open_clip", reason="needs fp4graph[clients]")

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
TEXTS = torch.randint(1, 63, (4, 8), generator=torch.Generator().manual_seed(2))


def clip():
    torch.manual_seed(0)
    return open_clip.CLIP(
        embed_dim=32,
        vision_cfg=open_clip.CLIPVisionCfg(layers=2, width=64, head_width=32, patch_size=8, image_size=32),
        text_cfg=open_clip.CLIPTextCfg(context_length=8, vocab_size=64, width=64, heads=2, layers=2),
    )


def by_encoders(model):
    images, texts = model.encode_image(IMAGES, normalize=True), model.encode_text(TEXTS, normalize=True)
    return images, texts, model.logit_scale.exp()


def trained(run, policy="tetrajet", **options):
    """Train as open_clip's train_one_epoch does; return the model and the losses."""
    model = applied(clip(), policy, **options)
    optimizer, losses = prepared(model), []
    for _ in range(3):
        losses += descend(lambda: open_clip.ClipLoss()(*run(model)), optimizer, 1)
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
    return model, losses


@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_open_clip_by_encoders_trains_as_by_its_call(policy, products, policy_warnings):
    model, losses = trained(lambda model: model(IMAGES, TEXTS), policy)
    assert not policy_warnings()
    counted = dict(products)
    assert set(counted.values()) == {3}
    assert len(counted) == 2 * 2 * 4  # in and out projection, two linears; two layers of two towers
    products.clear()
    other, losses_by_encoders = trained(by_encoders, policy)
    assert products == counted
    assert losses == losses_by_encoders
    assert losses[-1] < losses[0]
    assert same(model.parameters(), other.parameters())
    assert runtime_of(model).count == runtime_of(other).count == 3
    # There is a warning for each module that the methods call.
    assert {text.split("'")[1].split(".")[0] for text in policy_warnings()} == {"visual", "transformer"}


def test_encoders_are_compiled_where_they_are_named(products, policy_warnings):
    model, losses = trained(by_encoders, methods=["encode_image", "encode_text"])
    assert losses[-1] < losses[0]
    assert set(products.values()) == {3}
    assert len(products) == 2 * 2 * 4
    assert runtime_of(model).count == 2 * 3  # each call of a method is a forward
    assert not policy_warnings()


def test_transformers_clip(products, policy_warnings):
    torch.manual_seed(0)
    tower = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 64, "max_position_embeddings": 8, "eos_token_id": 63},
        vision_config={**tower, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    model = applied(transformers.CLIPModel(config), "tetrajet")
    descend(lambda: model(input_ids=TEXTS, pixel_values=IMAGES, return_loss=True).loss, prepared(model), 2)
    assert set(products.values()) == {2}
    assert len(products) == 2 * 2 * 6
    model.eval()
    with torch.no_grad():
        called = model(input_ids=TEXTS, pixel_values=IMAGES)
        products.clear()
        images = model.get_image_features(pixel_values=IMAGES)
        texts = model.get_text_features(input_ids=TEXTS)
    assert set(products.values()) == {1}
    assert len(products) == 2 * 2 * 6
    for features, embeds in ((images, called.image_embeds), (texts, called.text_embeds)):
        features = getattr(features, "pooler_output", features)
        assert torch.equal(features / features.norm(p=2, dim=-1, keepdim=True), embeds)
    assert sorted(text.split("'")[1] for text in policy_warnings()) == ["text_model", "vision_model"]
