"""Training under Inductor stays close to training under eager, for 20 steps.

The model is two blocks of a ViT, more where a policy keeps the ends, or two blocks of a LLaMA for the policy that acts
on SwiGLUs. Each policy is a case, except those for experts, and so is each technique that changes a forward or a
backward.

Quantized training amplifies an ulp (1e-7 becomes 1e-2 in ten steps), so a fixed tolerance would be arbitrary. The unit
is the change of the losses under eager when the output of every linear and norm, and its gradient, moves by one ulp:
compiled code sums there in another order. Compiled code may change the losses by three units. An ulp of the pixels
would be too small a unit, because the quantizers of the first layers round it away. Whether an ulp moves an element
over a rounding threshold is a matter of chance, so that one training says little. Both changes are therefore medians
over five sets of images. Recipes that differ in one rounding exceed the bound, as
``test_a_wrong_recipe_exceeds_the_bound`` shows. A case takes most of a minute: ``make long`` runs one over three sets,
``make parity`` runs all over five and prints the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4graph_policies
import pytest
import timm.layers
import torch
import transformers
from fp4graph_plugins.smooth_swiglu import ChannelScales
from torch import nn

import fp4graph
from fp4graph.technique.registry import default_registry
from tests.helpers.policies import MXFP4, NVFP4, depth_of, one_rule, without_experts
from tests.helpers.steps import descend
from tests.helpers.training import prepared

pytestmark = pytest.mark.compiler

STEPS = 20
SETS = 5
BOUND = 3
WIDTH = {"embed_dim": 192, "num_heads": 3}
POLICIES = without_experts(sorted(file.stem for file in Path(fp4graph_policies.__file__).parent.glob("*.yaml")))

FLOOR = {**MXFP4, "scale": {"format": "e8m0"}}
ENCODE = {**NVFP4, "scale": {**NVFP4["scale"], "convention": "encode"}}
NOISE = {"sigma_start": 1e-2, "sigma_end": 1e-3, "stages": 3, "steps_per_stage": 5}
#: For each technique, a format that suits it, and the techniques that it requires before it.
TECHNIQUES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "stochastic_rounding": (MXFP4, [{"stochastic_rounding": {"operands": "all_activation", "bits": 8}}]),
    "stochastic_scale_rounding": (NVFP4, ["stochastic_scale_rounding"]),
    "hadamard": (MXFP4, ["hadamard"]),
    "tensor_scaling": (NVFP4, [{"tensor_scaling": {"headroom": 0.5}}]),
    "tensor_scaling_gradient": (NVFP4, ["tensor_scaling", {"tensor_scaling_gradient": {"kind": "hybrid"}}]),
    "smooth_max": (NVFP4, [{"smooth_max": {"kind": "softmax"}}]),
    "quest_scale": (FLOOR, ["quest_scale"]),
    "step_gradient": (MXFP4, [{"step_gradient": {"kind": "dge"}}]),
    "scale_gradient": (NVFP4, [{"smooth_max": {"kind": "absmax"}}, "scale_gradient"]),
    "q_ema": (MXFP4, ["q_ema"]),
    "learned_scale": (NVFP4, ["tensor_scaling", "learned_scale"]),
    "smooth_swiglu": (NVFP4, ["smooth_swiglu"]),
    "macro_block_scaling": (MXFP4, [{"macro_block_scaling": {"block": 64}}]),
    "outlier_fallback": (MXFP4, ["outlier_fallback"]),
    "adaptive_quantization_noise": (MXFP4, [{"adaptive_quantization_noise": NOISE}]),
    "outlier_clamp": (MXFP4, ["outlier_clamp"]),
    "low_rank_residual": (MXFP4, [{"low_rank_residual": {"rank": 4}}]),
    "four_over_six": (NVFP4, [{"tensor_scaling": {"target": 256}}, "four_over_six"]),
    "element_choice": (NVFP4, ["tensor_scaling", "element_choice"]),
    "mean_split": (NVFP4, ["tensor_scaling", "mean_split"]),
    "ms_eden": (NVFP4, [{"hadamard": {"scope": "backward", "block": 64}}, {"ms_eden": {"block": 64}}]),
    "conditional_scaling": (ENCODE, ["conditional_scaling"]),
    "out_control": (NVFP4, ["tensor_scaling", {"out_control": {"mode": "wait"}}]),
}
#: Options that replace those of a technique in later phases, by the number of forwards before the phase.
LATER: dict[str, dict[int, Any]] = {
    "out_control": {2: {"out_control": {"mode": "measure"}}, 5: {"out_control": {"mode": "split"}}}
}


def test_no_shipped_technique_is_left_out() -> None:
    shipped = {t.name for t in default_registry().techniques.values() if t.__module__.startswith("fp4graph_plugins.")}
    in_the_optimizer = {"q_ramping", "dampen", "freeze", "osci_reset", "loss_scaling", "stable_spam"}
    assert shipped - in_the_optimizer == TECHNIQUES.keys()


def losses(make: Callable[[], nn.Module], policy: Any, backend: str, images: torch.Tensor) -> torch.Tensor:
    """Return the losses of a training on ``images``, fp64 ``[STEPS]``; fp32 would hide differences below its ulp."""
    torch._dynamo.reset()
    model = fp4graph.apply(make(), policy, backend=backend, total_forwards=STEPS)
    labels = torch.arange(len(images)) % 10
    values = descend(
        lambda: nn.functional.cross_entropy(model(images).double(), labels), prepared(model, lr=1e-3), STEPS
    )
    return torch.tensor(values, dtype=torch.float64)


def nudged(model: nn.Module) -> nn.Module:
    """Return ``model`` with hooks that move each output of a linear or a norm, and its gradient, by up to an ulp."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.LayerNorm):
            width = module.out_features if isinstance(module, nn.Linear) else module.normalized_shape[0]
            signs = torch.randint(0, 2, (64, 1, width), generator=generator) * 2 - 1
            factors = 1 + signs * 2.0**-23

            def nudge(_module: nn.Module, _args: Any, y: torch.Tensor, factors: torch.Tensor = factors) -> torch.Tensor:
                return y * (factors if y.dim() == 3 else factors[:, 0])

            module.register_forward_hook(nudge)
    return model


def ratio(name: str, make: Callable[[], nn.Module], policy: Any, other: Any, backend: str, sets: int = SETS) -> float:
    """Return the distance of ``other`` under ``backend`` from ``policy`` under eager, in units of one ulp's effect.

    The distance of two trainings is the largest difference of their losses; its median is over the sets of images.
    """
    compiled, ulp = [], []
    for seed in range(1, 1 + sets):
        images = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        eager = losses(make, policy, "eager", images)
        assert eager[-1] < eager[0], "it does not train"
        compiled.append((losses(make, other, backend, images) - eager).abs().max().item())
        ulp.append((losses(lambda: nudged(make()), policy, "eager", images) - eager).abs().max().item())
    far, near = statistics.median(compiled), statistics.median(ulp)
    print(f"\n{name:28} compiled {far:.2e}  one ulp {near:.2e}  ratio {far / near:.2f}", flush=True)
    return far / near


def check(name: str, make: Callable[[], nn.Module], policy: Any, sets: int = SETS) -> None:
    assert ratio(name, make, policy, policy, "inductor", sets) <= BOUND


class Llama(nn.Module):
    """Two of LLaMA's blocks, with their SwiGLU, on patches of images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        size = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 3}
        self.patches = nn.Linear(3 * 8 * 8, 192)
        self.blocks = transformers.LlamaModel(transformers.LlamaConfig(**size, vocab_size=8, use_cache=False))
        self.head = nn.Linear(192, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images.reshape(len(images), 3, 4, 8, 4, 8).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return self.head(self.blocks(inputs_embeds=self.patches(rows)).last_hidden_state.mean(1))


#: Policies with a technique that acts on no site of a ViT.
LLAMAS = ("nvfp4-smooth-swiglu",)


@pytest.mark.long
@pytest.mark.slow
def test_smooth_swiglu_acts_in_the_llama_and_not_in_the_vit(
    monkeypatch: pytest.MonkeyPatch, vit: Callable[..., nn.Module]
) -> None:
    widths, pair_context = [], ChannelScales.pair_context

    def seen(self: Any, left: torch.Tensor, right: torch.Tensor, context: Any) -> tuple[torch.Tensor, ...]:
        widths.append(left.shape[-1])
        return pair_context(self, left, right, context)

    monkeypatch.setattr(ChannelScales, "pair_context", seen)
    images = torch.zeros(2, 3, 32, 32)
    fp4graph.apply(Llama(), LLAMAS[0], backend="eager")(images)
    assert widths == [512, 512]
    widths.clear()
    with pytest.warns(fp4graph.PolicyWarning, match="smooth_swiglu.*no effect in this model"):
        fp4graph.apply(vit(**WIDTH), LLAMAS[0], backend="eager")(images)
    assert widths == []


CASES = [("tetrajet", 3), *(pytest.param(name, SETS, marks=pytest.mark.parity) for name in POLICIES)]


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize(("name", "sets"), CASES)
def test_policies(name: str, sets: int, vit: Callable[..., nn.Module]) -> None:
    check(name, Llama if name in LLAMAS else lambda: vit(**WIDTH, depth=depth_of(name)), name, sets)


@pytest.mark.parity
@pytest.mark.parametrize("name", list(TECHNIQUES))
def test_techniques(name: str, vit: Callable[..., nn.Module]) -> None:
    quantize, techniques = TECHNIQUES[name]
    options = {"mlp_layer": timm.layers.SwiGLU} if name == "smooth_swiglu" else {}
    policy = one_rule(*techniques, quantize=quantize, match={"op": "linear", "module": "blocks.*.mlp.*"})
    (rule,) = policy["rules"]
    policy["phases"] = [
        {"at": at, "rules": [{**rule, "techniques": [*techniques[:-1], technique]}]}
        for at, technique in LATER.get(name, {}).items()
    ]
    check(name, lambda: vit(**WIDTH, **options), policy)


#: Pairs of shipped policies: the second has another scale rule, lacks a quantizer, rounds gradients otherwise, or has
#: another scale format and block.
WRONG = [
    ("mxfp4", "mxfp4-round-up"),
    ("tetrajet", "tetrajet-no-wq"),
    ("mxfp4-full", "mxfp4-full-sr"),
    ("nvfp4", "ue5m3"),
]


@pytest.mark.parity
@pytest.mark.parametrize(("right", "wrong"), WRONG)
def test_a_wrong_recipe_exceeds_the_bound(right: str, wrong: str, vit: Callable[..., nn.Module]) -> None:
    """Both recipes run under eager; the second stands for a program that was compiled wrongly."""
    assert ratio(f"{right} as {wrong}", lambda: vit(**WIDTH), right, wrong, "eager") > BOUND
