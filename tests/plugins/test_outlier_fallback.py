"""outlier_fallback against Q(X) + m·Q(X − Q(X)), where a loop finds the blocks with m = 1."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fp4graph
from tests.helpers.models import llama
from tests.helpers.policies import loaded, quantizer
from tests.plugins.layer import DRAW, SPEC, Layer, gaussian


def policy(options=None, rounding="nearest", block=32, **rule):
    return loaded("outlier_fallback", options, quantize=quantizer(block) | {"rounding": rounding}, **rule)


quantized = Layer(policy, 96, 64).quantized


def heavy_tailed(*shape, seed=0):
    """Return Gaussian numbers, with one outlier in every seventh block of 32."""
    x = gaussian(*shape, seed=seed)
    x.view(-1)[:: 32 * 7] *= torch.linspace(10, 300, len(x.view(-1)[:: 32 * 7]))
    return x


def blocks(x, length=32):
    """Return row, first column and end column of every block, in order."""
    return [(r, c, min(c + length, x.shape[1])) for r in range(x.shape[0]) for c in range(0, x.shape[1], length)]


def chosen(x, options):
    """Return the blocks in which the largest element that becomes zero is largest; among equal blocks, the first."""
    q = fp4graph.fake_quantize(x, SPEC)
    pairs = [list(zip(x[r, a:b].tolist(), q[r, a:b].tolist(), strict=True)) for r, a, b in blocks(x)]
    score = [max((abs(v) for v, w in block if w == 0), default=0.0) for block in pairs]
    if "threshold" in options:
        top = max((abs(v) for block in pairs for v, w in block if w == w), default=0.0)
        return [i for i, s in enumerate(score) if s > options["threshold"] * top]
    count = math.ceil(round(options.get("fraction", 0.1) * len(score), 9))
    return sorted(range(len(score)), key=lambda i: (-score[i], i))[:count]


def expected(x, selected):
    """Return Q(X), with the second pass of the ``selected`` blocks added."""
    y = fp4graph.fake_quantize(x, SPEC)
    again, places = fp4graph.fake_quantize(x - y, SPEC), blocks(x)
    for r, a, b in (places[index] for index in selected):
        y[r, a:b] += again[r, a:b]
    return y


@pytest.mark.parametrize("width", [96, 80])  # 80: the last block of each row is padded
@pytest.mark.parametrize("options", [{}, {"fraction": 0.3}, {"fraction": 1.0}, {"threshold": 0.002}])
def test_the_blocks_that_lose_most_get_a_second_pass(width, options):
    x = heavy_tailed(40, width)
    selected, y = chosen(x, options), quantized(x, options)
    assert 0 < len(selected) <= options.get("fraction", 0.5) * len(blocks(x))
    assert torch.equal(y, expected(x, selected))
    assert (y != fp4graph.fake_quantize(x, SPEC)).any()


@pytest.mark.parametrize("width", [320, 304])  # 304: the last block of each row is padded
@pytest.mark.parametrize("options", [{}, {"fraction": 0.3}, {"threshold": 0.002}])
def test_by_rows_a_line_chooses_among_its_own_blocks(width, options):
    x = heavy_tailed(24, width)
    x[3], x[4, 5] = 0, math.nan
    count = len(blocks(x[:1]))
    selected = [row * count + i for row, line in enumerate(x.split(1)) for i in chosen(line, options)]
    by_row = {**options, "granularity": "row"}
    y = quantized(x, by_row)
    torch.testing.assert_close(y, expected(x, selected), rtol=0, atol=0, equal_nan=True)
    assert not torch.equal(quantized(x, options).nan_to_num(), y.nan_to_num())
    # A token does not depend on the other tokens, so a rollout quantizes it as the training forward does.
    alone = torch.cat([quantized(line, by_row) for line in x.split(1)])
    torch.testing.assert_close(alone, y, rtol=0, atol=0, equal_nan=True)
    assert quantized(x[:0], by_row).shape == (0, width)


def test_of_equal_blocks_the_first_are_chosen_and_a_tenth_of_thirty_is_three():
    """Computed in floats, the count would be four, because 0.1 is a little above a tenth."""
    x = heavy_tailed(1, 32).repeat(10, 3)
    assert torch.equal(quantized(x, {"fraction": 0.1}), expected(x, [0, 1, 2]))


def test_with_every_block_chosen_only_elements_below_a_twelfth_of_the_residual_become_zero():
    """A pass sets elements below a quarter of its scale to zero. The scale of the second pass is a sixth of the maximum
    of the residual, at most doubled by rounding to a power of two; a quarter of that is a twelfth."""
    x = heavy_tailed(64, 96)
    q = fp4graph.fake_quantize(x, SPEC)
    y = quantized(x, {"fraction": 1.0})
    residual = (x - q).view(64, 3, 32).abs().amax(-1, keepdim=True).expand(64, 3, 32).reshape(64, 96)
    assert x[y == 0].square().sum() < x[q == 0].square().sum() / 4
    assert (x[y == 0].abs() <= residual[y == 0] / 12).all()
    assert (x[q == 0].abs() > residual[q == 0] / 12).any()


def test_the_second_pass_draws_other_noise_and_is_unbiased():
    stochastic = replace(SPEC, rounding="stochastic")
    x = heavy_tailed(64, 96)
    total = quantized(x, {"fraction": 1.0}, rounding="stochastic")
    first = fp4graph.fake_quantize(x, stochastic, key=DRAW.varying)
    assert not torch.equal(total, first + fp4graph.fake_quantize(x - first, stochastic, key=DRAW.varying))
    # The mean of the second pass over many elements of one value is their residual.
    x = torch.full((200, 96), 1.2)
    x[:, ::32] = 6.0
    total = quantized(x, {"fraction": 1.0}, rounding="stochastic")
    first = fp4graph.fake_quantize(x, stochastic, key=DRAW.varying)
    for value in (1.0, 1.5):
        second = (total - first)[first == value]
        assert second.unique().numel() > 1
        assert abs(second.mean() - (1.2 - value)) < 4 * second.std() / second.numel() ** 0.5


def test_inf_does_not_count_as_the_largest_magnitude():
    """Otherwise no block would pass the threshold."""
    x = heavy_tailed(8, 96)
    x[2, 40] = math.inf
    y, q = quantized(x, {"threshold": 0.001}), fp4graph.fake_quantize(x, SPEC)
    assert not torch.equal(y.nan_to_num(), q.nan_to_num())


@pytest.mark.parametrize("block", ["row", "tensor", [4, 32]])
def test_other_shapes_of_blocks(block):
    x = heavy_tailed(40, 96)
    spec = replace(SPEC, block=tuple(block) if isinstance(block, list) else block)
    q = fp4graph.fake_quantize(x, spec)
    every = quantized(x, {"fraction": 1.0}, block=block)
    assert torch.equal(every, q + fp4graph.fake_quantize(x - q, spec))
    selected = quantized(x, {"fraction": 0.3}, block=block)
    assert ((selected == q) | (selected == every)).all()


@pytest.mark.long
def test_by_rows_a_rollout_has_the_probabilities_of_the_training_forward():
    """A forward of single tokens on a cache agrees with a forward of all tokens, unless blocks of all rows compete."""
    tokens, divergence = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(0)), {}
    for granularity in ("tensor", "row"):
        model = llama().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3 if parameter.dim() == 2 else 1)
        model.config.use_cache = True
        fp4graph.apply(model, policy({"operands": ["fprop.input"], "granularity": granularity}), backend="eager")
        with torch.no_grad():
            together = model(input_ids=tokens, use_cache=False).logits.log_softmax(-1)
            out = model(input_ids=tokens[:, :8], use_cache=True)
            parts = [out.logits]
            for place in range(8, 24):
                out = model(input_ids=tokens[:, place, None], past_key_values=out.past_key_values, use_cache=True)
                parts.append(out.logits)
        apart = torch.cat(parts, 1).log_softmax(-1)
        divergence[granularity] = (together.exp() * (together - apart)).sum(-1).mean().item()
    assert divergence["tensor"] > 1e-3
    assert abs(divergence["row"]) < 1e-6
