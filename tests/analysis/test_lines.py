"""Lines taken out of operands are what the training multiplied, and their moments are those of its noise."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from fp4graph.analysis import lines as lines_module
from fp4graph.analysis import metrics
from fp4graph.analysis.decomposition import with_ideal_scales
from fp4graph.analysis.lines import Lines, Quantizers, Raw, Rows, Selection, _quantized_whole, quantize_together
from fp4graph.numerics import noise, scaling
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.quantize import round_elements
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.observe import ObservedOperand
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.ops.state import StateSlot
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import default_registry

QEma = default_registry().techniques["q_ema"]

SPECS = {
    "nearest": QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), ties="up"),
    "stochastic": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), rounding="stochastic"),
    "few bits": QuantSpec("e2m1", 32, rounding="stochastic", random_bits=3),
    "encode": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode"), rounding="stochastic"),
    "row": QuantSpec("int4", "row", ScaleSpec("fp32", "nearest_even")),
}


def seen(program: OperandProgram, x: torch.Tensor, count: int = 3) -> ObservedOperand:
    draw = Draw(noise.make_key("site"), noise.make_step(0, 0, count))
    return ObservedOperand(Operand.WGRAD_INPUT, program, x, x, program(x, draw, {}), draw, {})


def taken(one: ObservedOperand, selection: Selection) -> Raw | Lines:
    return lines_module.taken(one, selection, Quantizers())


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
    draw = lines_module._row_draw([raw], Rows((tuple(raw.x.shape),), raw.width))
    rows = quantize_together([raw])
    blocking = Blocking(tuple(rows.x.shape), program.spec.block)
    scale = rows.scales.reshape(blocking.scale_shape)
    ratio = scaling.ratio(blocking.split(rows.x), scale, program.spec)
    bits = noise.Noise(None, blocking, x.device) if draw is None else draw.noise(blocking, x.device)
    again = round_elements(ratio, program.spec, bits)
    again = blocking.join(scaling.dequantize(again, scale, program.spec))
    assert torch.equal(rows.rows.of(again, 0), raw.q)
    assert raw.x.numel() < x.numel()


@pytest.mark.parametrize("name", SPECS)
def test_lines_together_and_the_whole_operand_agree(name):
    """Of three operands of two shapes, under one quantizer, whose rows lie below each other."""
    program = OperandProgram(SPECS[name])
    quantizers = Quantizers()
    shapes = [(64, 100), (7, 40, 100), (64, 100)]
    if program.spec.block != "row":
        shapes[1] = (7, 40, 70)
    ones, selections = [], [Selection(shape, 2000) for shape in shapes]
    raw = []
    for count, (shape, selection) in enumerate(zip(shapes, selections, strict=True)):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(count))
        ones.append(seen(program, x, count))
        raw.append(lines_module.taken(ones[-1], selection, quantizers))
    assert len({each.alike() for each in raw}) == 1
    together = quantize_together(raw)
    assert len(together.scales) == sum(together.blocks)
    for place, (one, selection) in enumerate(zip(ones, selections, strict=True)):
        whole = _quantized_whole(one, selection, raw[place].q)
        for field in ("x", "q", "ideal", "ratio"):
            own = together.rows.of(getattr(together, field), place)
            assert torch.equal(own, whole.rows.of(getattr(whole, field), 0)), field
        own, other = together.moments(place), whole.moments(0)
        assert torch.equal(own.mean, other.mean)
        assert (own.variance is None and other.variance is None) or torch.equal(own.variance, other.variance)


def test_of_techniques_those_that_act_block_by_block_are_quantized_with_lines_of_their_state():
    spec = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), ties="up")
    q_ema = QEma(beta=0.9)
    slots = tuple(StateSlot("q_ema", entry) for entry in q_ema.state(None))
    program = OperandProgram(spec, (q_ema,), slots)
    ones, raw, quantizers = [], [], Quantizers()
    for count, shape in enumerate([(64, 96), (40, 70)]):
        generator = torch.Generator().manual_seed(count)
        x = torch.randn(shape, generator=generator)
        state = {"q_ema": {"weight": x + 0.3 * torch.randn(shape, generator=generator)}}
        ones.append(ObservedOperand(Operand.FPROP_WEIGHT, program, x, x, program(x, None, state), None, state))
        raw.append(lines_module.taken(ones[-1], Selection(shape, 1000), quantizers))
        assert isinstance(raw[-1], Raw)
    together = quantize_together(raw)
    for place, one in enumerate(ones):
        whole = _quantized_whole(one, raw[place].selection, raw[place].q)
        for field in ("x", "q", "ideal", "ratio"):
            own = together.rows.of(getattr(together, field), place)
            assert torch.equal(own, whole.rows.of(getattr(whole, field), 0)), field
    by_rtn = quantize_together([taken(seen(OperandProgram(spec), one.x), Selection(one.x.shape, 1000)) for one in ones])
    assert not torch.equal(by_rtn.ideal, together.ideal)
    counting = OperandProgram(spec, (QEma(start_after=5),), slots)
    assert not lines_module.by_block(counting)  # how many forwards there were is not in the lines


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("convention", ["decode", "encode"])
def test_a_block_that_is_not_finite_and_is_filled_up(bad, convention):
    """The last block of a line has 8 elements: those are what is not finite, and not the 24 that it is filled with."""
    program = OperandProgram(QuantSpec("e2m1", 32, ScaleSpec("e4m3", "nearest_even", convention)))
    x = normal(4, 40)
    x[0, 39] = bad
    selection = Selection((4, 40), None)
    raw = taken(one := seen(program, x), selection)
    together, whole = quantize_together([raw]), _quantized_whole(one, selection, raw.q)
    sums = metrics.operand_sums(together)
    assert sums["elements"].tolist() == [152]
    assert sums["nonfinite"].tolist() == [8]
    for name, value in metrics.operand_sums(whole).items():
        torch.testing.assert_close(sums[name], value, rtol=1e-5, atol=0)  # sums in another order
    latents = [
        metrics.latent_sums(each.ratio, each.rows, each.element, frozenset({"confidence", "latent"}))
        for each in (together, whole)
    ]
    for name, value in latents[1].items():
        torch.testing.assert_close(latents[0][name], value)


class Doubling(QEma):
    """Derived from one that acts block by block, and does not say that it does so itself."""

    name = "doubling"

    def block_statistic(self, values, z, context):
        return z.amax().expand_as(z)


class Wrapping(Doubling):
    name = "wrapping"
    by_block = True

    def around(self, quantize, x, context):
        y = quantize(x)
        return y + quantize(x - y)


def test_who_acts_block_by_block():
    spec = QuantSpec("e2m1", 32)
    assert lines_module.by_block(OperandProgram(spec, (QEma(),)))
    assert not lines_module.by_block(OperandProgram(spec, (Doubling(),)))
    assert not lines_module.by_block(OperandProgram(spec, (Wrapping(),)))  # whatever it says


def test_programs_that_differ_in_their_source_are_one():
    spec = QuantSpec("e2m1", 32, rounding="stochastic")
    quantizers = Quantizers()
    first = OperandProgram(spec)
    assert quantizers.one(first) is quantizers.one(OperandProgram(dataclasses.replace(spec, source="fprop")))
    assert quantizers.one(first) is not quantizers.one(OperandProgram(dataclasses.replace(spec, block=16)))


@pytest.mark.parametrize("name", ["stochastic", "few bits", "encode"])
def test_moments_by_many_draws(name):
    program = OperandProgram(SPECS[name])
    x = normal(8, 64)
    raw = taken(seen(program, x), Selection((8, 64), None))
    moments = quantize_together([raw]).moments(0)
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
        assert torch.equal(lines.rows.of(lines.q, 0), selection.of(total(program(x))))
        assert torch.equal(lines.rows.of(lines.ideal, 0), selection.of(total(with_ideal_scales(program)(x))))
        assert lines.variance is None
        assert torch.equal(lines.mean, lines.q)


def test_normalized_and_stochastic():
    """γ is in the moments; of what is random in other ways than rounding there are none."""
    techniques = default_registry().techniques
    spec = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), rounding="stochastic")
    program = OperandProgram(spec, (techniques["tensor_scaling"](),))
    x = normal(16, 64) * 1e-4
    lines = taken(seen(program, x), Selection((16, 64), None))
    draws = torch.stack([total(seen(program, x, count).terms) for count in range(500)])
    assert torch.allclose(draws.mean(0), lines.mean, atol=0.2 * draws.std(0).max().item())
    assert torch.allclose(draws.std(0), lines.variance.sqrt(), atol=0.2 * draws.std(0).max().item())
    twice = OperandProgram(spec, (techniques["outlier_fallback"](),))
    assert taken(seen(twice, x), Selection((16, 64), None)).mean is None
    scales = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "stochastic"))
    assert taken(seen(OperandProgram(scales), x), Selection((16, 64), None)).mean is None


def test_keys_side_by_side_are_those_of_one(monkeypatch):
    keys, words = torch.stack([noise.make_key(i) for i in range(5)], 1), torch.arange(5, dtype=torch.int32) * 7 - 9
    together = noise.derive_all(keys, words)
    alone = [noise.derive(keys[:, i], int(words[i])) for i in range(5)]
    assert torch.equal(together, torch.stack(alone, 1))
    assert torch.equal(noise.derive_all(keys, words, 3, words), noise.derive_all(noise.derive_all(together, 3), words))
    monkeypatch.setattr(noise, "_readable", lambda key: False)  # by tensor code
    assert torch.equal(noise.derive_all(keys, words, 3), noise.derive_all(together, 3))


def test_what_is_selected():
    x = torch.arange(12 * 100 * 50, dtype=torch.float32).reshape(3, 4, 100, 50)
    assert Selection(tuple(x.shape), None).of(x).shape == (12, 100, 50)
    some = Selection(tuple(x.shape), 4000)
    lines = some.of(x)
    assert lines.shape[0] <= 4
    assert 2000 <= lines.numel() <= 4000
    assert torch.equal(lines[..., 0].int().flatten(), some.starts(50, x.device))
    rows = Rows((tuple(lines.shape),), 32).stack([lines])
    assert torch.equal(rows[:, 0].int(), some.starts(32, x.device))
    assert Selection((1000, 100_000), 16_384).of(torch.empty(1000, 100_000, device="meta")).shape == (1, 8, 100_000)
