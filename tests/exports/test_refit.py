"""Packed matrices for a server: decoded by ml_dtypes, they equal the weights that an eval forward multiplies."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.exports import ExportError
from fp4graph.exports.refit import PackedMatrix
from fp4graph.graph.siblings import SIBLINGS
from tests.exports.models import MXFP4, NVFP4, TOKENS, by_rule, e2m1, llama, mixture, multiplied, policy, trained

W4A16 = "nvfp4-w4a16"
WEIGHTS_ALONE = by_rule(MXFP4, operands={"fprop.input": "keep"})


def decoded(matrix: PackedMatrix) -> np.ndarray:
    """Return the values of a matrix: products in float64, rounded to fp32 before and after γ."""
    elements = e2m1(matrix.codes.numpy())
    kind = ml_dtypes.float8_e8m0fnu if matrix.global_scale is None else ml_dtypes.float8_e4m3fn
    scales = matrix.scales.view(torch.uint8).numpy().view(kind).astype(np.float64)
    block = elements.shape[1] // scales.shape[1]
    products = (elements * np.repeat(scales, block, -1)).astype(np.float32)
    gamma = 1.0 if matrix.global_scale is None else matrix.global_scale.item()
    return (products.astype(np.float64) * gamma).astype(np.float32)


def names(model: Any, **options: Any) -> list[str]:
    return [matrix.name for matrix in fp4graph.packed_weights(model, **options)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "under", [W4A16, "nvfp4-qad-lsq", policy(MXFP4), policy(NVFP4)], ids=["shared", "learned", "mxfp4", "without γ"]
)
def test_decoded_matrices_are_the_weights_of_an_eval_forward(under):
    model = trained(llama(), under)
    weights = multiplied(model)
    packed = list(fp4graph.packed_weights(model))
    assert [f"{matrix.name}.weight" for matrix in packed] == list(weights)
    for matrix in packed:
        np.testing.assert_array_equal(decoded(matrix), weights[f"{matrix.name}.weight"].numpy())


@pytest.mark.slow
def test_each_expert_has_a_name():
    model = trained(mixture("Qwen3-MoE"), W4A16)
    weights = multiplied(model)
    packed = {matrix.name: decoded(matrix) for matrix in fp4graph.packed_weights(model)}
    stack = "model.layers.0.mlp.experts"
    gates_and_ups, downs = (weights[f"{stack}.{name}_proj"].numpy() for name in ("gate_up", "down"))
    for expert, (both, down) in enumerate(zip(gates_and_ups, downs, strict=True)):
        gate, up = both.reshape(2, -1, both.shape[-1])
        for name, expected in {"gate_proj": gate, "up_proj": up, "down_proj": down}.items():
            np.testing.assert_array_equal(packed[f"{stack}.{expert}.{name}"], expected)


@pytest.mark.slow
def test_only_changed_matrices_are_sent_again():
    model, sent = trained(llama(), W4A16), dict[str, bytes]()
    everything = names(model, sent=sent)
    assert names(model, sent=sent) == []
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] *= -1
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)  # q, k and v share γ, so k and v change too
        model(torch.zeros(1, 4, dtype=torch.int64))  # γ is made anew before a forward
    first, second = "model.layers.0.self_attn", "model.layers.1.mlp.down_proj"
    expected = [*(f"{first}.{name}_proj" for name in "qkv"), second]
    for matrix in fp4graph.packed_weights(model, sent=sent):
        assert matrix.name == expected[0]
        break  # as if the transfer failed: the matrix does not count as sent
    assert names(model, sent=sent) == expected
    assert sent.keys() == {*everything}


@pytest.mark.slow
def test_siblings_with_scales_of_their_own_are_refused_before_they_are_sent():
    model = trained(llama(), policy(NVFP4, "tensor_scaling"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
        for layer in model.model.layers:
            for name in "qkv":
                layer.self_attn.get_submodule(f"{name}_proj").weight[0, 0] = 1.0
    matrices = fp4graph.packed_weights(model)
    taken = [matrix.name for matrix in itertools.islice(matrices, 4)]
    assert taken == [f"model.layers.0.self_attn.{name}_proj" for name in "qkvo"]
    with pytest.raises(ExportError, match=r"layers\.0\.mlp: γ of gate_proj .* times apart.*share: siblings"):
        next(matrices)
    assert len(names(model, sibling_scales="own")) == 21


@pytest.mark.slow
def test_siblings_with_a_module_between_them_are_compared():
    layers = {"gate_proj": nn.Linear(64, 64), "inner": nn.Sequential(nn.Linear(64, 64)), "up_proj": nn.Linear(64, 64)}
    under = by_rule(NVFP4, "tensor_scaling", operands={"fprop.input": "keep"})
    model = fp4graph.apply(nn.Sequential(nn.Sequential(OrderedDict(layers))), under, backend="eager")
    model(torch.randn(4, 64))
    with pytest.raises(ExportError, match=r"0: γ of gate_proj .*, up_proj .* times apart"):
        names(model)
    assert names(model, sibling_scales="own") == ["0.gate_proj", "0.inner.0", "0.up_proj"]


@pytest.mark.slow
def test_under_autocast_siblings_share_the_maximum_of_weights_in_bf16():
    """bf16 rounds some of the many maxima up and some down."""
    model = fp4graph.apply(llama(), W4A16, backend="eager").eval()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(TOKENS)
        for matrix in fp4graph.packed_weights(model):
            owner, _, last = matrix.name.rpartition(".")
            family = next((family for family in SIBLINGS if last in family), (last,))
            weights = [model.get_submodule(f"{owner}.{each}").weight.bfloat16().float() for each in family]
            largest = max(weight.abs().max() for weight in weights)
            assert matrix.global_scale == largest / (6 * 448)


@pytest.mark.slow
def test_experts_of_gpt_oss_stay_together():
    model = trained(mixture("GPT-OSS"), "mxfp4-w4a16-experts")
    weights = multiplied(model)
    for matrix in fp4graph.packed_weights(model):
        for expert, values in enumerate(weights[matrix.name]):
            of_expert = PackedMatrix(matrix.name, matrix.codes[expert], matrix.scales[expert], None)
            np.testing.assert_array_equal(decoded(of_expert), values.numpy())


def test_weights_without_a_product_are_named_and_adapters_refused():
    class Text(nn.Sequential):
        def forward(self, x):
            return self[0](x)

    towers = Text(OrderedDict(text=nn.Linear(32, 32), vision=nn.Linear(32, 32)))
    adapted = nn.Sequential(OrderedDict(layer=nn.Sequential(OrderedDict(base_layer=nn.Linear(32, 32)))))
    for model in (towers, adapted):
        fp4graph.apply(model, WEIGHTS_ALONE, backend="eager").eval()(torch.ones(1, 32))
    with pytest.warns(fp4graph.PolicyWarning, match=r"1 weights that .* were multiplied .*: vision\.weight\. To"):
        assert names(towers) == ["text"]
    with pytest.raises(ExportError, match="Merge them first"):
        names(adapted)


@pytest.mark.slow
def test_wrong_calls_are_named():
    with pytest.raises(fp4graph.Error, match="did you mean 'refuse'"):
        fp4graph.packed_weights(llama(), sibling_scales="refuses")
    with pytest.raises(fp4graph.Error, match="apply"):
        names(llama())
    with pytest.raises(fp4graph.Error, match="has not been called since"):
        names(fp4graph.apply(llama(), W4A16))
    with pytest.raises(ExportError, match="is the same parameter and needs it in high precision"):
        names(trained(llama(tie_word_embeddings=True), WEIGHTS_ALONE))
