"""Blocks as views: shapes, padding, indices."""

from __future__ import annotations

import itertools

import pytest
import torch

from fp4graph.kernels import operators
from fp4graph.numerics.blocking import Blocking, Groups, maximum
from fp4graph.numerics.scaling import amax

SHAPES = [(7,), (64,), (6, 64), (64, 6), (5, 33), (2, 3, 40), (2, 33, 17)]
BLOCKS = [1, 16, 32, (2, 16), (16, 16), "row", "tensor"]
CASES = [
    (shape, block, dim)
    for shape, block in itertools.product(SHAPES, BLOCKS)
    for dim in range(len(shape))
    if not (isinstance(block, tuple) and len(shape) == 1)
]


@pytest.mark.parametrize(("shape", "block", "dim"), CASES)
def test_join_inverts_split_and_indices_are_row_major(shape, block, dim):
    x = torch.randn(shape)
    blocking = Blocking(shape, block, dim)
    values = blocking.split(x)
    assert list(values.shape) == blocking.layout
    assert torch.equal(blocking.join(values), x)
    assert values.square().sum() == pytest.approx(x.square().sum().item())  # the padding is zeros

    index = blocking.join(blocking.index("cpu").expand(blocking.layout))
    assert index.dtype == torch.int32
    assert torch.equal(index, torch.arange(x.numel(), dtype=torch.int32).reshape(shape))

    blocks = blocking.block_index("cpu")
    assert list(blocks.shape) == blocking.scale_shape == list(values.amax(blocking.axes, keepdim=True).shape)
    assert torch.equal(blocks.flatten(), torch.arange(blocks.numel(), dtype=torch.int32))


def test_the_elements_of_the_first_block():
    x = torch.arange(24.0).reshape(4, 6)

    def first(block, dim):
        blocking = Blocking(x.shape, block, dim)
        inside = blocking.join(blocking.block_index("cpu").expand(blocking.layout)) == 0
        return x[inside].tolist()

    assert first(2, 1) == [0, 1]
    assert first(2, 0) == [0, 6]
    assert first((2, 3), 0) == first((2, 3), 1) == [0, 1, 2, 6, 7, 8]
    assert first("row", 1) == [0, 1, 2, 3, 4, 5]
    assert first("row", 0) == [0, 6, 12, 18]
    assert first("tensor", 0) == x.flatten().tolist()


@pytest.mark.parametrize("dim", [0, 1])
def test_full_blocks_are_a_view(dim):
    x = torch.randn(64, 96)
    for view in (x, x.t(), x[:1].expand(64, 96)):
        split = Blocking(view.shape, 32, dim).split(view)
        assert split.data_ptr() == view.data_ptr()
        assert split.untyped_storage().nbytes() == x.untyped_storage().nbytes()


def test_the_blocked_layout_keeps_the_order_of_axes():
    blocking = Blocking((64, 96), 32, 0)
    assert (blocking.layout, blocking.axes, blocking.scale_shape) == ([2, 32, 96], (1,), [2, 1, 96])
    blocking = Blocking((5, 64, 96), (16, 32), 0)
    assert (blocking.layout, blocking.axes) == ([5, 4, 16, 3, 32], (2, 4))


def test_indices_wrap_around_at_32_bits(monkeypatch):
    """The first axis has a stride of 2^33 elements. Of each axis, only the last two positions are computed."""
    sizes, arange = (3, 2**20, 2**13), torch.arange
    monkeypatch.setattr(torch, "arange", lambda size, **options: arange(size - 2, size, **options))
    index = Blocking(sizes, "tensor").index("cpu")
    places = itertools.product(*(range(size - 2, size) for size in sizes))
    exact = [(i * sizes[1] + j) * sizes[2] + k for i, j, k in places]
    assert index.flatten().tolist() == [(number + 2**31) % 2**32 - 2**31 for number in exact]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize(
    "largest",
    [
        lambda x: maximum(x.abs(), (0, 1)),
        lambda x: amax(x, (0,)),
        lambda x: Groups(Blocking(tuple(x.shape), "row"), "tensor").reduce(x.abs(), "amax"),
        operators.largest_of_all,
    ],
)
def test_the_maximum_of_no_elements_is_zero(largest, rows):
    """Of rows that a mask chooses, so that a compiler does not know their number, and of a known number of rows."""
    x = torch.cat([torch.arange(1.0, 13).view(3, 4)[:rows], -torch.ones(5, 4)])
    chosen = torch.compile(lambda x: largest(x[x[:, 0] > 0]), backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for maxima in (chosen(x), largest(x[:rows])):
            assert maxima.amax() == (12 if rows else 0)
            assert maxima.shape == largest(x).shape


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "expected"), [(0, torch.inf), (3, 1.0)])
def test_the_minimum_is_the_negated_maximum_of_negated_numbers(rows, expected):
    x = torch.cat([torch.arange(1.0, 13).view(3, 4)[:rows], -torch.ones(5, 4)])

    @torch.compile(backend="aot_eager")
    def smallest(x):
        z = x[x[:, 0] > 0].unsqueeze(-1)
        groups = Groups(Blocking(tuple(z.shape[:-1]), 1), "tensor")
        return -groups.reduce(-z, "amax", fill=-torch.inf), -groups.reduce(-z, "amax")

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        infinite_if_empty, zero_if_empty = smallest(x)
    assert infinite_if_empty.item() == expected
    assert zero_if_empty.item() == (expected if rows else 0)
