"""Lines taken out of operands are what the training multiplied, and their moments are those of its noise."""

from __future__ import annotations

import pytest
import torch

from fp4graph.analysis.decomposition import with_ideal_scales
from fp4graph.analysis.lines import Lines, Raw, Selection, _line_noise, _quantized_whole, quantize_together, taken
from fp4graph.numerics import noise, scaling
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.quantize import round_elements
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.operands import Operand
from fp4graph.ops.matmul import Seen
from fp4graph.ops.program import Draw, OperandProgram, total
from fp4graph.registry import default_registry

SPECS = {
    "nearest": QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), ties="up"),
    "stochastic": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), rounding="stochastic"),
    "few bits": QuantSpec("e2m1", 32, rounding="stochastic", random_bits=3),
    "encode": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode"), rounding="stochastic"),
    "row": QuantSpec("int4", "row", ScaleSpec("fp32", "nearest_even")),
}


def seen(program: OperandProgram, x: torch.Tensor, count: int = 3) -> Seen:
    draw = Draw(noise.make_key("site"), noise.make_step(0, 0, count))
    return Seen(Operand.WGRAD_INPUT, program, x, x, program(x, draw, {}), draw, {})


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (6, 20, 70)])
def test_the_rounding_of_sampled_lines_is_that_of_the_operand(name, shape):
    """Random bits included: each element draws those of its place in the whole."""
    program = OperandProgram(SPECS[name])
    x = normal(*shape) if len(shape) == 3 else normal(*reversed(shape)).mT  # a view, as gradients are
    selection = Selection(shape, 1000)
    raw = taken(seen(program, x), selection)
    assert isinstance(raw, Raw)
    blocking = Blocking((1, *raw.x.shape), program.spec.block)
    lines = quantize_together([raw])
    scale = lines.scales.reshape(blocking.scale_shape)
    ratio = scaling.ratio(blocking.split(lines.x), scale, program.spec)
    again = round_elements(ratio, program.spec, _line_noise([raw], blocking))
    again = blocking.join(scaling.dequantize(again, scale, program.spec))
    assert torch.equal(again[0], raw.q)
    assert raw.x.numel() < x.numel()


@pytest.mark.parametrize("name", SPECS)
def test_lines_alone_and_the_whole_operand_agree(name):
    program = OperandProgram(SPECS[name])
    x = normal(64, 100)
    selection = Selection((64, 100), 2000)
    one = seen(program, x)
    raw = taken(one, selection)
    alone = quantize_together([raw, raw])
    whole = _quantized_whole(one, selection, raw.q)
    for field in ("x", "q", "ideal", "ratio"):
        assert torch.equal(getattr(alone, field)[1:], getattr(whole, field)), field
    for field in ("mean", "variance"):
        a, b = getattr(alone.moments.of(1), field), getattr(whole.moments, field)
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("name", ["stochastic", "few bits", "encode"])
def test_moments_by_many_draws(name):
    program = OperandProgram(SPECS[name])
    x = normal(8, 64)
    raw = taken(seen(program, x), Selection((8, 64), None))
    moments = quantize_together([raw]).moments
    draws = torch.stack([total(seen(program, x, count).terms) for count in range(1000)]).double()
    spread = moments.variance.double().sqrt()
    assert ((draws.mean(0) - moments.mean).abs() < 5 * spread / 1000**0.5 + 1e-6).all()
    assert ((draws.std(0) - spread).abs() <= 0.15 * spread + 0.15 * spread.max()).all()
    if name != "few bits":  # unbiased, and nothing is clipped by these scales by more than their rounding
        assert ((draws.mean(0) - x).square().sum() / x.square().sum()).sqrt() < 0.05


def test_programs_of_techniques_are_quantized_whole():
    techniques = default_registry().techniques
    spec = QuantSpec("e2m1", 32, ScaleSpec("e4m3", "nearest_even"))
    for name in ("tensor_scaling", "macro_block_scaling", "outlier_fallback", "four_over_six"):
        program = OperandProgram(spec, (techniques[name](),))
        lines = taken(seen(program, x := normal(64, 256)), selection := Selection((64, 256), 4000))
        assert isinstance(lines, Lines)
        assert torch.equal(lines.q[0], selection.of(total(program(x))))
        assert torch.equal(lines.ideal[0], selection.of(total(with_ideal_scales(program)(x))))
        assert lines.moments.variance is None
        assert torch.equal(lines.moments.mean, lines.q)


def test_normalized_and_stochastic():
    """γ is in the moments; of what is random in other ways than rounding there are none."""
    techniques = default_registry().techniques
    spec = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), rounding="stochastic")
    program = OperandProgram(spec, (techniques["tensor_scaling"](),))
    x = normal(16, 64) * 1e-4
    lines = taken(seen(program, x), Selection((16, 64), None))
    draws = torch.stack([total(seen(program, x, count).terms) for count in range(500)])
    assert torch.allclose(draws.mean(0), lines.moments.mean[0, 0], atol=0.2 * draws.std(0).max().item())
    assert torch.allclose(draws.std(0), lines.moments.variance[0, 0].sqrt(), atol=0.2 * draws.std(0).max().item())
    twice = OperandProgram(spec, (techniques["outlier_fallback"](),))
    assert taken(seen(twice, x), Selection((16, 64), None)).moments.mean is None
    scales = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "stochastic"))
    assert taken(seen(OperandProgram(scales), x), Selection((16, 64), None)).moments.mean is None


def test_keys_side_by_side_are_those_of_one():
    keys, words = torch.stack([noise.make_key(i) for i in range(5)], 1), torch.arange(5, dtype=torch.int32) * 7 - 9
    together = noise.derive_all(keys, words)
    alone = [noise.derive(keys[:, i], int(words[i])) for i in range(5)]
    assert torch.equal(together, torch.stack(alone, 1))


def test_what_is_selected():
    x = torch.arange(12 * 100 * 50, dtype=torch.float32).reshape(3, 4, 100, 50)
    assert Selection(tuple(x.shape), None).of(x).shape == (12, 100, 50)
    some = Selection(tuple(x.shape), 4000)
    lines = some.of(x)
    assert lines.shape[0] <= 4
    assert 2000 <= lines.numel() <= 4000
    assert torch.equal(lines[..., 0].int(), some.numbers(x.device)[..., 0] * 50)
    assert Selection((1000, 100_000), 16_384).of(torch.empty(1000, 100_000, device="meta")).shape == (1, 8, 100_000)
