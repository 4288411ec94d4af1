"""Block scales and whole quantizers: vectorised code beside the scalar oracle, on one table of specs."""

from __future__ import annotations

import itertools
import math
from functools import partial

import gfloat
import numpy as np
import pytest
import torch
from gfloat import formats as gfloat_formats

from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.formats import ELEMENTS, SCALES, element_format, scale_format
from fp4graph.numerics.noise import Noise, make_key
from fp4graph.numerics.packing import pack, unpack
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.scaling import amax, block_scale
from fp4graph.numerics.spec import POWERS_OF_TWO, QuantSpec, ScaleSpec
from tests.helpers import ml_formats, oracle
from tests.helpers.floats import any_floats, assert_same_bits, blocks_of_every_scale

DECODE = ("floor", "ceil", "nearest_even", "toward_positive", "stochastic", "amax_ceil", "amax_even")
SCALE_SPECS = [
    ScaleSpec(name, rounding, convention, zero)
    for name, (convention, roundings), zero in itertools.product(
        SCALES, (("decode", DECODE), ("encode", ("nearest_even", "stochastic"))), ("nearest_subnormal", "to_one")
    )
    for rounding in roundings
    if rounding not in POWERS_OF_TWO or not scale_format(name).mantissa_bits
]
SCALE_SPECS += [
    ScaleSpec("e8m0", "nearest_even", convention, zero, "even")
    for convention, zero in itertools.product(("decode", "encode"), ("nearest_subnormal", "to_one"))
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", SCALE_SPECS, ids=lambda s: f"{s.format.name}-{s.rounding}-{s.convention}-{s.zero}-{s.ties}"
)
def test_scales_agree_with_the_oracle(spec):
    blocks = torch.cat([blocks_of_every_scale(1), any_floats((100, 1))])
    blocking = Blocking(blocks.shape, "row")
    noise = Noise(make_key(5), blocking, blocks.device)
    bits = noise.block_bits().flatten().tolist()
    z = amax(blocks, blocking.axes)
    for name in ("e2m1", "e3m0", "int4", "int8", "e4m3"):
        element = element_format(name)
        expected = [oracle.scale_of_block(row, spec, element, b) for row, b in zip(blocks.tolist(), bits, strict=True)]
        assert_same_bits(block_scale(z, spec, element, noise), torch.tensor(expected)[:, None])


# Every element format with every rounding of elements, and E2M1 with every kind of scale.
QUANTIZERS = [
    *(
        QuantSpec(element, 8, ScaleSpec(scale, rounding, convention), "nearest", ties)
        for element, ties in itertools.product(ELEMENTS, ("even", "up", "away"))
        for scale, rounding, convention in (
            ("e8m0", "floor", "decode"),
            ("e4m3", "nearest_even", "decode"),
            ("fp32", "nearest_even", "encode"),
        )
    ),
    *(
        QuantSpec(element, 8, ScaleSpec("ue5m3", "nearest_even"), "stochastic", random_bits=bits)
        for element, bits in itertools.product(ELEMENTS, (3, 24))
    ),
    *(QuantSpec("e2m1", 8, scale) for scale in SCALE_SPECS),
    QuantSpec("e2m1", 8, ScaleSpec("e8m0", "stochastic"), "stochastic"),
]


@pytest.mark.parametrize("spec", QUANTIZERS, ids=str)
def test_quantizer_agrees_with_the_oracle(spec):
    x = torch.cat([blocks_of_every_scale(8)[::9], any_floats((10, 8)), torch.randn(10, 8)])
    assert_same_bits(fake_quantize(x, spec, key=7), oracle.quantized(x, spec, make_key(7)))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("block", [8, 5, (4, 8), (3, 5), "row", "tensor"])
def test_blocks_of_every_shape_agree_with_the_oracle(block, dim):
    x = torch.randn(3, 12, 20)
    x[0, 0, 0] = 100.0
    spec = QuantSpec("e2m1", block, ScaleSpec("e4m3", "nearest_even"), "stochastic")
    assert_same_bits(fake_quantize(x, spec, dim, key=3), oracle.quantized(x, spec, make_key(3), dim))


@pytest.mark.parametrize(("name", "dtype"), ml_formats.SCALES.items())
def test_nearest_scales_are_the_cast_of_ml_dtypes_and_torch(name, dtype):
    number = scale_format(name)
    z = torch.cat([blocks_of_every_scale(1).abs(), any_floats((2000, 1)).abs()])
    # Casts of ml_dtypes and torch give NaN beyond the range, and 2^-126 for everything between 2^-127 and 2^-126.
    z = z[(z[:, 0] / 4 >= max(number.min, 2.0**-126)) & (z[:, 0] / 4 <= number.max)]
    # E3M0, because its Qmax, 16, is a power of two: every number is the ideal scale of some z.
    scale = block_scale(z * 4, ScaleSpec(name, "nearest_even"), element_format("e3m0"))
    finite = (z * 4).isfinite()
    expected = torch.from_numpy((z / 4).numpy().astype(dtype).astype(np.float32))
    assert_same_bits(scale[finite], expected[finite])
    torch_dtype = {"e8m0": torch.float8_e8m0fnu, "e4m3": torch.float8_e4m3fn}[name]
    assert_same_bits(scale[finite], (z / 4).to(torch_dtype).float()[finite])


@pytest.mark.parametrize("convention", ["decode", "encode"])
def test_scales_with_ties_to_even_are_those_of_gfloat(convention):
    """1.5·2^k becomes 2^k if the code k + 127 is even, and 2^(k+1) if it is odd."""
    exponents = torch.arange(-124, 124).float()
    ideal = torch.cat([1.5 * exponents.exp2(), 1.25 * exponents.exp2(), exponents.exp2(), any_floats((2000,)).abs()])
    ideal = ideal[(ideal >= 2.0**-122) & (ideal <= 2.0**122)]
    # E3M0, because its Qmax, 16, is a power of two: every number is the ideal scale of some z.
    z = ideal * 16 if convention == "decode" else 16 / ideal
    found = block_scale(z, ScaleSpec("e8m0", "nearest_even", convention, ties="even"), element_format("e3m0"))
    exact = (z / 16 if convention == "decode" else 16 / z).double().numpy()
    mode = gfloat.RoundMode.TiesToEven
    expected = gfloat.round_ndarray(gfloat_formats.format_info_ocp_e8m0, exact, mode)
    assert_same_bits(found, torch.from_numpy(expected).float())


def test_ties_to_even_do_not_clip_blocks_of_every_second_power_of_two():
    """The figures of docs/formats.md. Z = 2^k has the ideal encode scale 6/Z, a tie of 4/Z and 8/Z. 8/Z clips Z."""
    x = torch.randn(2**17, 32, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    z = x.abs().amax(1)
    assert (z.frexp().mantissa == 0.5).double().mean().item() == pytest.approx(0.0098, abs=0.0003)
    x = x[z == 2]

    def error(of, convention, ties):
        spec = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "nearest_even", convention, ties=ties))
        return ((fake_quantize(of, spec) - of).double().square().sum() / of.double().square().sum()).item()

    assert error(x, "encode", "up") == pytest.approx(0.0227, abs=0.0003)
    assert error(x, "encode", "even") == pytest.approx(0.0107, abs=0.0003)  # 6/2 is the tie of codes 128 and 129
    assert error(2 * x, "encode", "even") == error(2 * x, "encode", "up") == error(x, "encode", "up")  # 127 and 128
    assert error(x, "decode", "even") == error(x, "decode", "up") == error(x, "encode", "up")  # 2/6 is not a tie


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", [s for s in SCALE_SPECS if s.zero == "to_one"], ids=str)
def test_nan_or_inf_poisons_its_block_alone(scale, bad):
    x = torch.randn(4, 16)
    clean = fake_quantize(x, QuantSpec(block=8, scale=scale), key=1)
    x[2, 3] = bad
    q = fake_quantize(x, QuantSpec(block=8, scale=scale), key=1)
    assert q[2, :8].isnan().all()
    q[2, :8] = clean[2, :8]
    assert_same_bits(q, clean)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_other_dtypes_are_computed_in_fp32(dtype):
    x = (torch.randn(8, 64, dtype=torch.float64) * 3).to(dtype)
    for spec in (QuantSpec(), QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"), "stochastic")):
        q = fake_quantize(x, spec, key=2)
        assert_same_bits(q, fake_quantize(x.float(), spec, key=2).to(dtype))
        assert q.shape == x.shape


def test_values_beyond_the_range_of_the_dtype_are_infinite():
    x = torch.full((1, 32), 65504.0, dtype=torch.float16)
    assert fake_quantize(x, QuantSpec(scale=ScaleSpec("e8m0", "ceil"))).isinf().all()  # 4 · 2^14
    assert (fake_quantize(x, QuantSpec()) == 49152).all()  # 6 · 2^13: floor saturates
    huge = torch.full((1, 32), 1e300, dtype=torch.float64)
    assert fake_quantize(huge, QuantSpec()).isnan().all()  # Inf in fp32


@pytest.mark.parametrize("shape", [(0,), (0, 8), (8, 0), (3, 0, 5), (0, 0)])
@pytest.mark.parametrize("dim", [0, -1])
def test_empty_tensors(shape, dim):
    x = torch.zeros(shape, dtype=torch.bfloat16)
    for block in (16, "row", "tensor", *([(4, 8)] if len(shape) > 1 else [])):
        spec = QuantSpec(block=block, rounding="stochastic")
        for q in (fake_quantize(x, spec, dim, key=1), unpack(pack(x, spec, dim, key=1))):
            assert (q.shape, q.dtype) == (shape, torch.bfloat16)


def test_any_strides():
    x = torch.randn(24, 40)
    spec = QuantSpec(rounding="stochastic")
    for view in (x.t(), x[::2, 1::3], x[:1].expand(10, 40), x.reshape(4, 6, 40).permute(2, 0, 1)):
        for dim in range(view.ndim):
            assert_same_bits(
                fake_quantize(view, spec, dim, key=1).contiguous(), fake_quantize(view.contiguous(), spec, dim, key=1)
            )


def test_a_last_block_that_is_not_full_is_padded_with_zeros():
    x = torch.randn(5, 70)
    q = fake_quantize(x, QuantSpec())
    assert_same_bits(q, fake_quantize(torch.nn.functional.pad(x, (0, 26)), QuantSpec())[:, :70])
    assert_same_bits(q, fake_quantize(x.t().contiguous(), QuantSpec(), 0).t())


X, SR, STOCHASTIC = torch.zeros(4, 32), QuantSpec(rounding="stochastic"), ScaleSpec("e8m0", "stochastic")
CPU = torch.device("cpu")


@pytest.mark.parametrize("scale", [ScaleSpec(), ScaleSpec("e4m3"), ScaleSpec("fp32"), STOCHASTIC], ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_gradients_pass_straight_through(scale, rounding):
    """As through the quantizers of torch and torchao, whatever the format of the scales; bytes have no gradient."""
    spec, x = QuantSpec("e2m1", 16, scale, rounding), torch.randn(4, 32, requires_grad=True)
    y, gradient = fake_quantize(x, spec, 0, 1), torch.randn(4, 32)
    assert_same_bits(y.detach(), fake_quantize(x.detach(), spec, 0, 1))
    y.mul_(2).backward(gradient)
    assert torch.equal(x.grad, 2 * gradient)
    (derived,) = torch.func.vjp(lambda x: fake_quantize(x, spec, 0, 1), x.detach())[1](gradient)
    assert torch.equal(derived, gradient)
    assert not fake_quantize(x.detach(), spec, 0, 1).requires_grad
    packed = pack(x, spec, 0, 1)
    assert not any(part.requires_grad for part in (packed.codes, packed.scales))


def test_transforms_of_functions_pass_gradients_straight_through():
    x, gradient = torch.randn(4, 32), torch.randn(4, 32)
    by_row = torch.func.vmap(torch.func.grad(lambda row: fake_quantize(row, QuantSpec()).sum()))
    assert torch.equal(by_row(x), torch.ones(4, 32))
    forward = partial(torch.func.jvp, lambda x: fake_quantize(x, QuantSpec()))
    for transform in (forward, torch.compile(forward, backend="eager")):
        assert torch.equal(transform((x,), (gradient,))[1], gradient)
    compiled = torch.compile(torch.func.grad(lambda x: fake_quantize(x, QuantSpec()).sum()), backend="eager")
    assert torch.equal(compiled(x), torch.ones(4, 32))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fake_quantize(torch.arange(4), QuantSpec()), r"torch.int64"),
        (lambda: fake_quantize([1.0], QuantSpec()), r"got a list; pass a torch.Tensor$"),
        (lambda: fake_quantize(X.to_sparse(), QuantSpec()), r"only dense .* got torch.sparse_coo; pass x.to_dense"),
        (lambda: fake_quantize(X, SR), "pass a key"),
        (lambda: fake_quantize(X, QuantSpec(scale=STOCHASTIC)), "pass a key"),
        (lambda: fake_quantize(X, SR, -1, torch.tensor(3)), "int32 tensor of two"),
        (lambda: fake_quantize(X, SR, -1, 3.0), "an int or an int32 tensor of two elements; got 3.0"),
        (lambda: fake_quantize(X[0], QuantSpec(block=(2, 2))), "two axes"),
        (lambda: fake_quantize(torch.tensor(1.0), QuantSpec()), "at least one axis"),
        (lambda: fake_quantize(X, QuantSpec(), 2), "out of range"),
        (lambda: block_scale(torch.ones(1), STOCHASTIC, ELEMENTS["e2m1"]), "needs noise"),
        (Noise(None, Blocking((4, 32), 32), CPU).bits, "pass a key"),
        (Noise(None, Blocking((4, 32), 32), CPU).block_bits, "pass a key"),
    ],
)
def test_misuse_is_refused(call, message):
    with pytest.raises(TypeError if "torch" in message else ValueError, match=message):
        call()


def test_a_key_may_be_a_number_of_numpy():
    assert torch.equal(fake_quantize(X, SR, key=np.int64(3)), fake_quantize(X, SR, key=3))


def test_stochastic_scales_are_unbiased():
    for name in ("e8m0", "e4m3", "e8m3"):
        z = torch.full((100_000, 1), 7.3)
        noise = Noise(make_key("scale"), Blocking(z.shape, "row"), z.device)
        scale = block_scale(z, ScaleSpec(name, "stochastic"), element_format("e2m1"), noise).double()
        assert len(scale.unique()) == 2
        ideal = float(np.float32(7.3) / np.float32(6))
        assert abs(scale.mean().item() - ideal) < 3 * scale.std().item() / math.sqrt(len(z))


@pytest.mark.parametrize(
    ("spec", "share"),
    [
        (QuantSpec("e2m1", 32, ScaleSpec("e8m0", "floor")), 0),
        (QuantSpec("e2m1", 16, ScaleSpec("e4m3")), 0),
        (QuantSpec("int4", 16, ScaleSpec("e4m3")), 0),
        (QuantSpec("e2m1", 16, ScaleSpec("e4m3", convention="encode")), 0.78),
        (QuantSpec("e2m1", "row", ScaleSpec("fp32")), 0.41),
        (QuantSpec("int4", "tensor", ScaleSpec("fp32")), 0.74),
    ],
)
def test_the_share_of_values_that_bf16_rounds_once_more(spec, share):
    """The first table of docs/parity.md, "Operands in bf16"."""
    y = fake_quantize(torch.randn(256, 1024).bfloat16().float(), spec)
    assert (y != y.bfloat16().float()).double().mean().item() == pytest.approx(share, abs=0.02)
