"""Operators for many experts give the bits of tensor code and of a loop of products."""

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
from tests.kernels.quantizers import DERIVED, KEY, MXFP4, SALTS, SOURCE, STEP, STOCHASTIC

pytestmark = [pytest.mark.compiler, pytest.mark.usefixtures("kernels")]

SPECS = {
    "MXFP4": MXFP4,
    "stochastic": QuantSpec("e2m1", 32, ScaleSpec("e8m0", "floor"), "stochastic"),
    "stochastic scales": STOCHASTIC,
    "encoding scales": QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even", "encode"), "stochastic"),
}
DTYPES = [torch.float32, torch.bfloat16]
N, K = 70, 96  # along N the last block is not full
#: Of each expert. Two experts have no tokens; some tokens before, between and behind the others have no expert.
STARTS, SIZES = torch.tensor([[2, 2, 9, 9], [0, 5, 0, 33]], dtype=torch.int32)
TOKENS = 45


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def places() -> Tensor:
    """Return positions of tokens in some order, one of them twice, and the position TOKENS, which reads as zeros: it
    fills the third block of 32."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    zero = torch.full((1,), TOKENS)
    return torch.cat([order[:20], zero.expand(15), order[19:30], zero.expand(50), order[30:]])


def weights(transposed: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights ``[E, N, K]`` of four experts, contiguous along K, or else along N."""
    return normal(4, K, N, dtype=dtype).mT if transposed else normal(4, N, K, dtype=dtype)


def packed(x: Tensor) -> PackedOperand:
    return operators.quantize_and_pack(x, MXFP4, None, x.dtype)[1]


def laid_out(x: Tensor) -> Tensor:
    return torch.cat([x, x.new_zeros(1, x.shape[1])])[places()]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_quantize_at(name, dtype):
    """Of a tensor, of columns of a wider tensor, of one channel; each also from bytes."""
    how = Direction(SPECS[name], SOURCE)
    for x in (normal(TOKENS, N, dtype=dtype), normal(TOKENS, N + 3, dtype=dtype)[:, 1 : N + 1], normal(TOKENS, 1)):
        y = experts.quantize_at(x, places(), how, x.dtype)
        assert_same_bits(y, fake_quantize(laid_out(x).mT, SPECS[name], -1, DERIVED))
        assert y.mT.is_contiguous()
        kept = packed(x)
        y = experts.quantize_at(kept, places(), how, x.dtype)
        assert_same_bits(y, fake_quantize(laid_out(kept.unpack()).mT, SPECS[name], -1, DERIVED))


def test_quantize_at_casts_from_fp32():
    spec = SPECS["encoding scales"]  # bf16 rounds its quotients
    x = normal(TOKENS, N)
    y = experts.quantize_at(x, places(), Direction(spec, SOURCE), torch.bfloat16)
    assert_same_bits(y, fake_quantize(laid_out(x).mT, spec, -1, DERIVED).bfloat16())


def turned(x: Tensor, turn: BlockRotation) -> Tensor:
    """Return x·S·H on zero-padded blocks of the last axis, by products with H in fp64."""
    pad = torch.nn.functional.pad(x.double(), (0, turn.padded(x.shape[-1]) - x.shape[-1]))
    signs = torch.ones(turn.block) if turn.signs is None else turn.signs
    h = torch.from_numpy(scipy.linalg.hadamard(turn.block)).double() / turn.block**0.5
    return (pad.unflatten(-1, (-1, turn.block)) * signs @ h).flatten(-2)


def whole(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return whole numbers of up to three bits, whose rotations by blocks of 4, 16 or 64 are exact."""
    return torch.randint(-7, 8, shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def turns(g: int) -> list[BlockRotation]:
    signs = 1.0 - 2 * torch.randint(0, 2, (g,), generator=torch.Generator().manual_seed(g)).float()
    return [BlockRotation(g), BlockRotation(g, signs)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("g", "block"), [(4, 16), (16, 16), (16, 32), (64, 64)])
def test_operators_rotate_before_they_quantize(g, block, dtype):
    """Tokens at their places, and weights of both layouts, whose lines are no multiple of a block."""
    spec = QuantSpec("e2m1", block, ScaleSpec("e4m3", "nearest_even"), "stochastic")
    x, order = whole(TOKENS, N, dtype=dtype), places()
    order = torch.cat([order, order.new_full((-len(order) % g,), TOKENS)])
    rows = torch.cat([x, x.new_zeros(1, N)])[order]
    k = K - 7
    for turn in turns(g):
        how = Direction(spec, SOURCE, rotation=turn)
        y = experts.quantize_at(x, order, how, dtype)
        # Adding 0 drops the signs of zeros, which depend on the order of a sum of zeros.
        assert_same_bits(y + 0, fake_quantize(turned(rows.mT, turn).float(), spec, -1, DERIVED).to(dtype) + 0)
        tokens = whole(TOKENS, turn.padded(k), dtype=dtype)
        for w in (whole(4, N, k, dtype=dtype), whole(4, k, N, dtype=dtype).mT):
            y, _ = experts.quantized_product(tokens, w, GROUPS, how)
            quantized = fake_quantize(turned(w, turn).float(), spec, -1, DERIVED).to(dtype)
            laid_out_as_w = quantized if w.stride(2) == 1 else quantized.mT.contiguous().mT
            assert_same_bits(y + 0, by_hand(tokens, laid_out_as_w) + 0)


GROUPS = Groups(STARTS, SIZES)
GAMMA = torch.tensor([1.1, 1.3, 1.7, 1.9])


def by_hand(left: Tensor, right: Tensor, gamma: Tensor | None = None) -> Tensor:
    """Multiply each expert's tokens with its matrix of ``right [E, N, K]``; other tokens give zeros."""
    y = left.new_zeros(left.shape[0], right.shape[1])
    for expert, (start, size, matrix) in enumerate(zip(STARTS.tolist(), SIZES.tolist(), right, strict=True)):
        tokens, result = left[start : start + size], y[start : start + size]
        if size and gamma is None:
            result.copy_(tokens @ matrix.mT)
        elif size:
            result.copy_(torch.addmm(left.new_zeros(()), tokens, matrix.mT, beta=0, alpha=gamma[expert].item()))
    return y


@pytest.mark.parametrize("transposed", [False, True], ids=["E, N, K", "E, K, N"])
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_quantized_product(name, dtype, transposed):
    """An expert's weight draws the noise of its place among all experts. The bytes are kept of experts with tokens."""
    x, w, spec = normal(TOKENS, K, dtype=dtype), weights(transposed, dtype), SPECS[name]
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
    """A divisor, a statistic and a power of two as factor for each block, and γ for each expert's accumulator."""
    x, w, spec = normal(TOKENS, K, dtype=dtype), weights(transposed, dtype), SPECS["stochastic"]
    each = torch.tensor([1.7, 0.3, 5.0, 0.9]).reshape(4, 1, 1).expand(4, N, K // 32)
    z = normal(4, N, K // 32, dtype=torch.float32).abs() + 1
    given = Blocks(divisor=each.contiguous(), statistic=z, factor=torch.full_like(each, 0.5).contiguous())
    quantized = operators.quantize(w, spec, SOURCE, given)
    assert not torch.equal(quantized, fake_quantize(w, spec, -1, DERIVED))
    y, _ = experts.quantized_product(x, w, Groups(STARTS, SIZES, GAMMA), Direction(spec, SOURCE, given))
    assert_same_bits(y, by_hand(x, quantized, GAMMA))


def test_weights_of_one_channel_are_packed():
    """torch calls them contiguous whatever their stride along K."""
    x, w = normal(TOKENS, 1), normal(4, 1, N).mT
    y, kept = experts.quantized_product(x, w, GROUPS, Direction(MXFP4), packs=True)
    assert kept is not None
    quantized = fake_quantize(w, MXFP4, -1, None)
    assert_same_bits(y, by_hand(x, quantized))
    assert_same_bits(kept.unpack()[SIZES > 0], quantized[SIZES > 0].contiguous())


@pytest.mark.parametrize("transposed", [False, True], ids=["E, N, K", "E, K, N"])
def test_quantized_product_of_wider_weights(transposed):
    """fp32 weights, as rotations leave them, are quantized, then cast to the bf16 of the GEMM."""
    x, w, spec = normal(TOKENS, K, dtype=torch.bfloat16), weights(transposed), SPECS["encoding scales"]
    y, _ = experts.quantized_product(x, w, GROUPS, Direction(spec, SOURCE))
    assert_same_bits(y, by_hand(x, fake_quantize(w, spec, -1, DERIVED).bfloat16()))


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SPECS)
def test_requantized_product(name, dtype):
    dy, kept, spec = normal(TOKENS, N, dtype=dtype), packed(normal(4, N, K, dtype=dtype)), SPECS[name]
    quantized = fake_quantize(kept.unpack().mT, spec, -1, DERIVED)
    quantized = quantized.mT.contiguous().mT  # as in the operator: the bits of a threaded GEMM depend on the layout
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
def test_operators_are_as_declared(name):
    check_declaration(name, OPERATORS[name])


@pytest.mark.parametrize(("start", "size"), [(-1, 3), (0, -1), (40, 6)])
def test_tokens_beyond_the_operand_are_refused(start, size):
    wrong = torch.tensor([[start], [size]], dtype=torch.int32)
    with pytest.raises(ValueError, match="offsets of a grouped product must not decrease"):
        experts.quantized_product(normal(TOKENS, K), normal(1, N, K), Groups(*wrong), Direction(MXFP4))
