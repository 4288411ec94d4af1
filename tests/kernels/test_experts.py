"""The operators for many experts beside the tensor code and a loop of products, bit for bit."""

from __future__ import annotations

import pytest
import scipy.linalg
import torch
from torch import Tensor

from fp4graph.kernels import experts, operators
from fp4graph.kernels.direction import Blocks, Direction, PackedOperand
from fp4graph.kernels.experts import Groups
from fp4graph.numerics.hadamard import BlockRotation
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.helpers.floats import assert_same_bits
from tests.helpers.operators import check_declaration
from tests.kernels.quantizers import DERIVED, KEY, SALTS, SOURCE, STEP

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

MXFP4 = QuantSpec("e2m1", 32, ScaleSpec("e8m0", "ceil"), "nearest", "up")
SPECS = {
    "MXFP4": MXFP4,
    "stochastic": QuantSpec("e2m1", 32, ScaleSpec("e8m0", "floor"), "stochastic"),
    "stochastic scales": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "stochastic"), "stochastic"),
    "encoding scales": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode"), "stochastic"),
}
DTYPES = [torch.float32, torch.bfloat16]
N, K = 70, 96  # a block that is not full along N
#: Tokens before, between and behind experts that belong to none; experts without tokens.
STARTS, SIZES = torch.tensor([[2, 2, 9, 9], [0, 5, 0, 33]], dtype=torch.int32)
TOKENS = 45


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def places() -> Tensor:
    """Positions of tokens in some order, one twice, with zeros between; the third block of 32 is zeros alone."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    none = torch.full((1,), TOKENS)
    return torch.cat([order[:20], none.expand(15), order[19:30], none.expand(50), order[30:]])


def packed(x: Tensor) -> PackedOperand:
    return operators.quantize_and_pack(x, MXFP4, None, x.dtype)[1]


def laid_out(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[places()]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_quantize_at(name, dtype):
    """Also from the columns of a wider tensor, from bytes, and of one channel."""
    how = Direction(SPECS[name], SOURCE)
    for x in (normal(TOKENS, N, dtype=dtype), normal(TOKENS, N + 3, dtype=dtype)[:, 1 : N + 1], normal(TOKENS, 1)):
        y = experts.quantize_at(x, places(), how, x.dtype)
        assert_same_bits(y, fake_quantize(laid_out(x).mT, SPECS[name], -1, DERIVED))
        assert y.mT.is_contiguous()
        kept = packed(x)
        y = experts.quantize_at(kept, places(), how, x.dtype)
        assert_same_bits(y, fake_quantize(laid_out(kept.unpack()).mT, SPECS[name], -1, DERIVED))


def test_quantize_at_casts_from_fp32():
    spec = SPECS["encoding scales"]  # whose quotients bf16 rounds
    x = normal(TOKENS, N)
    y = experts.quantize_at(x, places(), Direction(spec, SOURCE), torch.bfloat16)
    assert_same_bits(y, fake_quantize(laid_out(x).mT, spec, -1, DERIVED).bfloat16())


def turned(x: Tensor, turn: BlockRotation) -> Tensor:
    """x·S·H on zero-padded blocks of the last axis, by products with H in fp64, rounded once."""
    pad = torch.nn.functional.pad(x.double(), (0, turn.padded(x.shape[-1]) - x.shape[-1]))
    signs = torch.ones(turn.block) if turn.signs is None else turn.signs
    h = torch.from_numpy(scipy.linalg.hadamard(turn.block)).double() / turn.block**0.5
    return (pad.unflatten(-1, (-1, turn.block)) * signs @ h).flatten(-2)


def whole(*shape: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers of up to three bits: their rotations by blocks of 4, 16 or 64 are exact."""
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def turns(g: int) -> list[BlockRotation]:
    signs = 1.0 - 2 * torch.randint(0, 2, (g,), generator=torch.Generator().manual_seed(g)).float()
    return [BlockRotation(g), BlockRotation(g, signs)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("g", "block"), [(4, 16), (16, 16), (16, 32), (64, 64)])
def test_what_is_rotated_first(g, block, dtype):
    """Tokens at their places, and weights whose lines no block divides, of both layouts."""
    spec = QuantSpec("e2m1", block, ScaleSpec("e4m3", "nearest_even"), "stochastic")
    x, order = whole(TOKENS, N, dtype=dtype), places()
    order = torch.cat([order, order.new_full((-len(order) % g,), TOKENS)])
    rows = torch.cat([x, x.new_zeros(1, N)])[order]
    k = K - 7
    for turn in turns(g):
        how = Direction(spec, SOURCE, rotation=turn)
        y = experts.quantize_at(x, order, how, dtype)
        # Zeros are compared without their signs, which depend on the order of a sum of zeros.
        assert_same_bits(y + 0, fake_quantize(turned(rows.mT, turn).float(), spec, -1, DERIVED).to(dtype) + 0)
        tokens = whole(TOKENS, turn.padded(k), dtype=dtype)
        for w in (whole(4, N, k, dtype=dtype), whole(4, k, N, dtype=dtype).mT):
            y, _ = experts.quantized_product(tokens, w, GROUPS, how)
            quantized = fake_quantize(turned(w, turn).float(), spec, -1, DERIVED).to(dtype)
            alike = quantized if w.stride(2) == 1 else quantized.mT.contiguous().mT  # as the GEMM reads it
            assert_same_bits(y + 0, by_hand(tokens, alike) + 0)


GROUPS = Groups(STARTS, SIZES)
GAMMA = torch.tensor([1.1, 1.3, 1.7, 1.9])


def by_hand(left: Tensor, right: Tensor, gamma: Tensor | None = None) -> Tensor:
    """Multiply each expert's tokens with its matrix of ``right [E, N, K]``; other tokens give zeros."""
    y = left.new_zeros(left.shape[0], right.shape[1])
    for expert, (start, size, own) in enumerate(zip(STARTS.tolist(), SIZES.tolist(), right, strict=True)):
        tokens, found = left[start : start + size], y[start : start + size]
        if size and gamma is None:
            found.copy_(tokens @ own.mT)
        elif size:
            found.copy_(torch.addmm(left.new_zeros(()), tokens, own.mT, beta=0, alpha=gamma[expert].item()))
    return y


@pytest.mark.parametrize("transposed", [False, True], ids=["E, N, K", "E, K, N"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_quantized_product(name, dtype, transposed):
    """The noise of every expert's weight is that of its place among all experts. Bytes are those of the quantizer."""
    x, spec = normal(TOKENS, K, dtype=dtype), SPECS[name]
    w = normal(4, K, N, dtype=dtype).mT if transposed else normal(4, N, K, dtype=dtype)
    quantized, how = fake_quantize(w, spec, -1, DERIVED), Direction(spec, SOURCE)
    y, nothing = experts.quantized_product(x, w, GROUPS, how)
    assert nothing is None
    assert_same_bits(y, by_hand(x, quantized))
    y, kept = experts.quantized_product(x, w, GROUPS, how, packs=True)
    assert_same_bits(y, by_hand(x, quantized.contiguous()))
    assert kept is not None
    assert_same_bits(kept.unpack()[SIZES > 0], quantized[SIZES > 0].contiguous())


@pytest.mark.parametrize("transposed", [False, True], ids=["E, N, K", "E, K, N"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_quantized_product_given_numbers_of_blocks(dtype, transposed):
    """Divided by a number, with another statistic, multiplied by a power of two; and a number for each accumulator."""
    x, spec = normal(TOKENS, K, dtype=dtype), SPECS["stochastic"]
    w = normal(4, K, N, dtype=dtype).mT if transposed else normal(4, N, K, dtype=dtype)
    each = torch.tensor([1.7, 0.3, 5.0, 0.9]).reshape(4, 1, 1).expand(4, N, K // 32)
    z = normal(4, N, K // 32, dtype=torch.float32).abs() + 1
    given = Blocks(divisor=each.contiguous(), statistic=z, factor=torch.full_like(each, 0.5).contiguous())
    quantized = operators.quantize(w, spec, SOURCE, given)
    assert not torch.equal(quantized, fake_quantize(w, spec, -1, DERIVED))
    y, _ = experts.quantized_product(x, w, Groups(STARTS, SIZES, GAMMA), Direction(spec, SOURCE, given))
    assert_same_bits(y, by_hand(x, quantized, GAMMA))


def test_weights_of_one_channel_are_packed():
    """Contiguous by torch's rule, whatever the stride along K."""
    x, w = normal(TOKENS, 1), normal(4, 1, N).mT
    y, kept = experts.quantized_product(x, w, GROUPS, Direction(MXFP4), packs=True)
    assert kept is not None
    quantized = fake_quantize(w, MXFP4, -1, None)
    assert_same_bits(y, by_hand(x, quantized))
    assert_same_bits(kept.unpack()[SIZES > 0], quantized[SIZES > 0].contiguous())


@pytest.mark.parametrize("transposed", [False, True], ids=["E, N, K", "E, K, N"])
def test_quantized_product_of_wider_weights(transposed):
    """As rotations leave them: fp32, quantized, then cast to the GEMM's bf16."""
    x, spec = normal(TOKENS, K, dtype=torch.bfloat16), SPECS["encoding scales"]  # whose quotients bf16 rounds
    w = normal(4, K, N).mT if transposed else normal(4, N, K)
    y, _ = experts.quantized_product(x, w, GROUPS, Direction(spec, SOURCE))
    assert_same_bits(y, by_hand(x, fake_quantize(w, spec, -1, DERIVED).bfloat16()))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_requantized_product(name, dtype):
    dy, kept, spec = normal(TOKENS, N, dtype=dtype), packed(normal(4, N, K, dtype=dtype)), SPECS[name]
    quantized = fake_quantize(kept.unpack().mT, spec, -1, DERIVED)
    quantized = quantized.mT.contiguous().mT  # the operator's layout, on which the bits of a threaded GEMM depend
    for gamma in (None, GAMMA):
        y = experts.requantized_product(dy, kept, Groups(STARTS, SIZES, gamma), Direction(spec, SOURCE))
        assert_same_bits(y, by_hand(dy, quantized, gamma))


_w = packed(normal(4, N, K))
_x = packed(normal(TOKENS, N))
_text, _noise = SPECS["stochastic"].to_text(), (KEY, STEP, list(SALTS))
OPERATORS = {
    "quantize_at": (normal(TOKENS, N), places(), _text, *_noise, None, 0, torch.bfloat16),
    "requantize_at": (_x.codes, _x.scales, MXFP4.to_text(), N, torch.float32, places(), _text, *_noise),
    "quantized_product": (
        *(normal(TOKENS, K), normal(4, N, K), STARTS, SIZES, None, _text, *_noise),
        *(*Blocks(), None, 0, True),
    ),
    "requantized_product": (
        *(normal(TOKENS, N), _w.codes, _w.scales, MXFP4.to_text(), K, torch.float32),
        *(STARTS, SIZES, torch.ones(4), _text, *_noise),
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_keep_their_promises(name):
    check_declaration(name, OPERATORS[name])


@pytest.mark.parametrize(("start", "size"), [(-1, 3), (0, -1), (40, 6)])
def test_tokens_beyond_the_operand_are_refused(start, size):
    wrong = torch.tensor([[start], [size]], dtype=torch.int32)
    with pytest.raises(ValueError, match="offsets of a grouped product must not decrease"):
        experts.quantized_product(normal(TOKENS, K), normal(1, N, K), Groups(*wrong), Direction(MXFP4))
