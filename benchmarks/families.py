"""The models of :mod:`benchmarks.zoo`: one of each family of timm, and torchvision's classification models."""

from __future__ import annotations

from collections import ChainMap
from typing import Any


def _of(names: str, size: int, sized: bool = False, **options: Any) -> dict[str, dict[str, Any]]:
    """Return the entries of ``names``; a model that is ``sized`` takes the size of its images as an argument."""
    return {name: {"size": size, **({"img_size": size} if sized else {}), **options} for name in names.split()}


#: One architecture of each of timm's families (its modules), mostly the smallest, with arguments that make it small.
#: ``size`` is the side of the image. ``shorten`` cuts equal blocks in a row to two, because rules need a stack of
#: blocks. All other entries go to ``timm.create_model``.
TIMM = ChainMap(
    _of(
        "repvgg_a0 convmixer_768_32 cspresnet50 cspnext_tiny dla46_c dpn48b efficientnet_b0 fasternet_t0 ghostnet_050 "
        "hardcorenas_a hgnetv2_b0 hrnet_w18_small lcnetv2_small mobilenetv3_small_050 nf_resnet26 regnetx_002 "
        "repghostnet_050 res2net50_14w_8s resnest14d resnet10t resnetv2_18 rexnet_100 legacy_seresnet18 skresnet18 "
        "starnet_s050 vgg11",
        32,
    ),
    _of(
        "cpubone_nano csatv2 edgenext_xx_small efficientvim_m1 efficientvit_b0 fastvit_t8 focalnet_tiny_srf iformer_t "
        "lowformer_b0 poolformer_s12 mobilenetv5_base mobilevit_xxs nasnetalarge nextvit_small pnasnet5large "
        "pvt_v2_b0 rdnet_tiny repvit_m0_9 selecsls42 shvit_s1 swiftformer_xs tresnet_m xception41",
        64,
    ),
    _of("inception_resnet_v2 inception_v3 inception_v4", 80),
    _of("efficientformer_l1 tiny_vit_5m_224", 224),
    _of("legacy_xception", 71),
    _of("halonet26t", 256),
    _of(
        "coat_lite_tiny efficientformerv2_s0 efficientvit_m0 levit_128s coatnet_pico_rw_224 mixer_s32_224 mvitv2_tiny "
        "nest_tiny pit_ti_224 vitamin_small_224 volo_d1_224",
        64,
        sized=True,
    ),
    _of("crossvit_9_240", 120, sized=True),
    _of("inception_next_atto mambaout_femto", 64, depths=(2, 2, 2, 2)),
    _of("convnext_atto", 32, depths=(2, 2, 2, 2)),
    _of("densenet121", 32, block_config=(2, 2, 2, 2)),
    _of("naflexvit_base_patch16_gap", 32, depth=2, embed_dim=192, num_heads=3),
    _of("ese_vovnet19b_slim_dw", 32, shorten=False),
    _of("gemma4_vit_167m", 48, depth=2),
    _of("deepseek_vit_412m", 56, depth=2),
    _of("davit_tiny", 64, depths=(1, 1, 2, 1)),
    _of("hieradet_small", 64, stages=(1, 1, 2, 1)),
    _of("qwen3_vit_88m", 64, depth=2),
    _of(
        "cait_xxs24_224 deit_tiny_distilled_patch16_224 vit_tiny_patch16_224 vit_relpos_small_patch16_224",
        32,
        sized=True,
        depth=2,
    ),
    _of("tnt_s_patch16_224 vit_tiny_r_s16_p8_224 xcit_nano_12_p16_224", 64, sized=True, depth=2),
    _of("swinv2_tiny_window8_256 swinv2_cr_tiny_224", 64, sized=True, depths=(2, 2), num_heads=(3, 6)),
    _of("eva02_tiny_patch14_224", 28, sized=True, depth=2),
    _of("beit_base_patch16_224", 32, sized=True, depth=2, embed_dim=192, num_heads=3),
    _of("convit_tiny", 32, sized=True, depth=4, local_up_to_layer=2),
    _of(
        "sequencer2d_s",
        56,
        sized=True,
        layers=(2, 2, 2, 2),
        embed_dims=(48, 96, 96, 96),
        hidden_sizes=(12, 24, 24, 24),
    ),
    _of("swin_tiny_patch4_window7_224", 56, sized=True, depths=(2, 2), num_heads=(3, 6)),
    _of("gcvit_xxtiny", 64, sized=True, window_size=(2, 2, 4, 2)),
    _of("hiera_tiny_224", 64, sized=True, stages=(1, 1, 2, 1)),
    _of("twins_svt_small", 64, sized=True, depths=(2, 2, 2, 2)),
    _of("visformer_tiny", 64, sized=True, depth=(2, 2, 2)),
    _of("samvit_base_patch16", 64, sized=True, depth=3, embed_dim=192, num_heads=3, global_attn_indexes=(2,)),
)

#: Arguments of torchvision's models that need another image size than 64 x 64 or other options.
TORCHVISION = ChainMap(
    _of("inception_v3", 299),
    _of("maxvit_t", 224, input_size=(224, 224)),
    _of("vit_b_16 vit_b_32 vit_l_16 vit_l_32", 32, image_size=32),
    _of("vit_h_14", 28, image_size=28),
)
