"""Sampled lines of operands hold the values that the training multiplied, and moments over its random bits."""

import math

import pytest
import torch

from fp4graph.lab.statistics import metrics, sampling
from fp4graph.lab.statistics.decomposition import with_ideal_scales
from fp4graph.lab.statistics.sampling import Selection, by_block, sample
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.ops.observe import ObservedOperand
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.product import total
from fp4graph.ops.state import StateSlot
from fp4graph.technique import BlockScale, Wrapper, parts_of
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import default_registry

TECHNIQUES = default_registry().techniques
QEma = TECHNIQUES["q_ema"]
#: NVFP4 without techniques.
E4M3 = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"))

SPECS = {
    "nearest": QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), ties="up"),
    "stochastic": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), rounding="stochastic"),
    "few bits": QuantSpec("e2m1", 32, rounding="stochastic", random_bits=3),
    "encode": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode"), rounding="stochastic"),
    "row": QuantSpec("int4", "row", ScaleSpec("fp32", "nearest_even")),
}


def observed(program, x, count=3):
    """Return ``x`` as it is observed under ``program``, with the random bits of the forward ``count``."""
    draw = Draw(noise.make_key("site"), noise.make_step(0, 0, count))
    return ObservedOperand(Operand.WGRAD_INPUT, program, x, draw, {}, given=x, terms=program(x, draw, {}))


@pytest.fixture
def of_whole(monkeypatch):
    """Return a function that samples like ``sample``, but quantizes the whole operand again."""

    def sampled_whole(observed, selection):
        with monkeypatch.context() as patched:
            patched.setattr(sampling, "by_block", lambda program: False)
            return sample(observed, selection)

    return sampled_whole


def same(one, other):
    """Return whether two samples agree in all but their scales, which may be those of the whole operand."""
    pairs = [(getattr(one, field), getattr(other, field)) for field in ("x", "q", "ideal", "ratio")]
    pairs += list(zip(one.moments, other.moments, strict=True))
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def with_technique(name, spec=E4M3, **options):
    return OperandProgram(spec, parts_of(TECHNIQUES[name](**options)))


def sampled(program, x, count=None):
    return sample(observed(program, x), Selection(tuple(x.shape), count))


def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("shape", [(40, 100), (100, 40), (6, 20, 70), (7, 40, 100)])
def test_sampled_lines_and_the_whole_operand_agree(name, shape, of_whole):
    """In random bits too: each element draws the bits of its place in the operand."""
    program = OperandProgram(SPECS[name])
    x = normal(*shape) if len(shape) == 3 else normal(*reversed(shape)).mT  # a transposed view, as gradients are
    operand, selection = observed(program, x), Selection(shape, 1000)
    assert by_block(program)
    found = sample(operand, selection)
    assert found.x.numel() < x.numel()
    assert found.scales.numel() < of_whole(operand, selection).scales.numel()
    assert same(found, of_whole(operand, selection))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stochastic", "few bits", "encode"])
def test_the_ideal_quantization_draws_the_bits_of_the_operand(name):
    """Where scales are exact already, ideal scales change nothing."""
    found = sampled(with_ideal_scales(OperandProgram(SPECS[name])), normal(64, 100), 1000)
    assert torch.equal(found.ideal, found.q)


@pytest.mark.parametrize("shape", [(64, 96), (40, 70)])
def test_techniques_that_act_block_by_block_are_sampled_with_lines_of_their_state(shape, of_whole):
    spec = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), ties="up")
    q_ema = parts_of(QEma(beta=0.9))
    slots = tuple(StateSlot("q_ema", entry) for part in q_ema for entry in part.state)
    program = OperandProgram(spec, q_ema, slots)
    x = normal(*shape)
    state = {"q_ema": {"weight": x + 0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(1))}}
    operand = ObservedOperand(Operand.FPROP_WEIGHT, program, x, None, state, given=x, terms=program(x, None, state))
    selection = Selection(shape, 1000)
    assert by_block(program)
    assert same(sample(operand, selection), of_whole(operand, selection))
    assert not torch.equal(sample(observed(OperandProgram(spec), x), selection).ideal, sample(operand, selection).ideal)
    assert not by_block(OperandProgram(spec, parts_of(QEma(start_after=5)), slots))  # which needs the count of forwards


@pytest.mark.slow
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("convention", ["decode", "encode"])
def test_padding_of_a_block_that_is_not_finite_is_not_counted(bad, convention, of_whole):
    """The last block of the line has 8 elements and 24 of padding."""
    program = OperandProgram(QuantSpec("e2m1", 32, ScaleSpec("e4m3", "nearest_even", convention)))
    x = normal(4, 40)
    x[0, 39] = bad
    operand, selection = observed(program, x), Selection((4, 40), None)
    samples = sample(operand, selection), of_whole(operand, selection)
    sums, of_all = (metrics.operand_sums(each) for each in samples)
    assert (sums["elements"], sums["nonfinite"]) == (152, 8)
    assert sums == of_all
    both = frozenset({"confidence", "latent"})
    latents, of_all = (metrics.latent_sums(each.ratio, each.element, both) for each in samples)
    assert all(torch.equal(latents[name], value) for name, value in of_all.items())


class Largest(BlockScale):
    """Gives every block the largest statistic of all blocks."""

    mixes = "tensor"

    def block_statistic(self, values, z, context):
        return z.amax().expand_as(z)


class Wrapping(Wrapper):
    mixes = "block"  # which is not relied on

    def around(self, quantize, x, context):
        y = quantize(x)
        return y + quantize(x - y)


@pytest.mark.parametrize("convention", ["decode", "encode"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("four_over_six", "quest_scale", "scale_gradient")),
        ("smooth_max", {"kind": "softmax"}),
        ("stochastic_rounding", {"range_guard": 1.0625}),
    ],
)
def test_techniques_that_mix_no_blocks_are_sampled_in_lines(name, options, convention, of_whole):
    spec = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", convention))
    program = with_technique(name, spec, **options)
    assert by_block(program)
    operand, selection = observed(program, normal(40, 100)), Selection((40, 100), 1000)
    assert same(sample(operand, selection), of_whole(operand, selection))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stochastic", "few bits", "encode", "scale of the tensor"])
def test_moments_by_many_draws(name):
    if name in SPECS:
        program, size = OperandProgram(SPECS[name]), 1.0
    else:
        program, size = with_technique("tensor_scaling", SPECS["stochastic"]), 1e-4
    x = normal(8, 64) * size
    moments = sampled(program, x).moments
    draws = torch.stack([total(observed(program, x, count).terms) for count in range(1000)]).double()
    spread = moments.variance[0].double().sqrt()
    assert ((draws.mean(0) - moments.mean[0]).abs() < 5 * spread / 1000**0.5 + 1e-6 * size).all()
    assert ((draws.std(0) - spread).abs() <= 0.15 * spread + 0.15 * spread.max()).all()
    if name != "few bits":  # its three bits bias the rounding, and its scales clip
        assert ((draws.mean(0) - x).square().sum() / x.square().sum()).sqrt() < 0.05


@pytest.mark.parametrize("name", ["tensor_scaling", "macro_block_scaling", "outlier_fallback"])
def test_techniques_that_mix_blocks_are_quantized_whole(name):
    assert by_block(with_technique("q_ema"))
    assert not any(by_block(OperandProgram(E4M3, (part(options=None),))) for part in (Largest, Wrapping))
    program = with_technique(name, QuantSpec("e2m1", 32, ScaleSpec("e4m3", "nearest_even")))
    assert not by_block(program)
    x, selection = normal(64, 256), Selection((64, 256), 4000)
    found = sample(observed(program, x), selection)
    assert torch.equal(found.q, selection.of(total(program(x))))
    assert torch.equal(found.ideal, selection.of(total(with_ideal_scales(program)(x))))
    assert found.moments.variance is None
    assert torch.equal(found.moments.mean, found.q)


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        with_technique("ms_eden"),
        with_technique("outlier_fallback", SPECS["stochastic"]),
        OperandProgram(QuantSpec("e2m1", 16, ScaleSpec("e4m3", "stochastic"))),
    ],
    ids=["scales drawn after rounding", "two roundings", "stochastic scales"],
)
def test_programs_whose_only_random_step_is_not_one_rounding_have_no_moments(program):
    """For MS-EDEN, the values of one draw are not the mean."""
    assert sampled(program, normal(64, 256)).moments.mean is None


def test_a_selection_takes_whole_lines_up_to_its_count():
    x = torch.arange(12 * 100 * 50, dtype=torch.float32).reshape(3, 4, 100, 50)
    assert Selection(tuple(x.shape), None).of(x).shape == (12, 100, 50)
    some = Selection(tuple(x.shape), 4000)
    lines = some.of(x)
    assert lines.shape[0] <= 4
    assert 2000 <= lines.numel() <= 4000
    assert torch.equal(lines.int(), some.index(x.device))
    assert Selection((1000, 100_000), 16_384).of(torch.empty(1000, 100_000, device="meta")).shape == (1, 8, 100_000)
