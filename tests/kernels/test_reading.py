"""The pass in Inductor that lets quantizers read the parts of a concatenation, and the input of a cast, where they lie:
equal values, fewer writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from fp4graph.kernels import operators
from fp4graph.kernels.direction import Direction
from fp4graph.kernels.library import READERS
from fp4graph.kernels.reading import read_in_place
from fp4graph.numerics.spec import QuantSpec, ScaleSpec

aten = torch.ops.aten
convert = torch.ops.prims.convert_element_type.default  # the cast of Inductor's graphs
NVFP4 = QuantSpec("e2m1", 16, ScaleSpec("e4m3", "nearest_even"))
MXFP4 = QuantSpec()
BATCH, HEADS, TOKENS, SIZE = 2, 3, 32, 16


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    along, down, _ = operators.quantize_both(x, Direction(NVFP4), Direction(MXFP4))
    return along, down


def packed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, stored = operators.quantize_and_pack(x, NVFP4, None, x.dtype)
    return values, stored.codes, stored.scales


def columns(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, stored = operators.quantize_and_pack_columns(x, Direction(NVFP4), Direction(MXFP4), x.dtype)
    return values, stored.codes, stored.scales


def readers(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.target in READERS]


def passed(function: Callable[..., object], *args: Tensor) -> tuple[GraphModule, list[list[tuple[int, ...]]], int]:
    """Return the graph of ``function`` after the pass, the shapes that each quantizer reads, and the number of casts,
    copies and concatenations that are left. Check that the pass changes no result."""
    graph = make_fx(function, tracing_mode="fake")(*args)
    expected = graph(*args)
    read_in_place(graph.graph)
    graph.graph.lint()
    graph.recompile()
    for result, due in zip(graph(*args), expected, strict=True):
        assert torch.equal(result, due)
    writes = (convert, aten.cat.default, aten.clone.default)
    read = [[tuple(part.meta["val"].shape) for part in node.args[0]] for node in readers(graph)]
    return graph, read, sum(node.target in writes for node in graph.graph.nodes)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def cast(x: Tensor) -> Tensor:
    return convert(x, torch.bfloat16)


@pytest.mark.parametrize("quantized", [both, packed, columns])
def test_a_cast_of_an_input_is_read_before_the_cast(quantized):
    graph, read, writes = passed(lambda w: quantized(cast(w)), numbers(32, 64))
    assert (read, writes) == ([[(32, 64)]], 0)
    assert [node.args[1] for node in readers(graph)] == [torch.bfloat16]


def test_a_cast_of_an_input_is_read_in_the_shape_of_a_view():
    _, read, writes = passed(lambda dy: both(cast(dy).view(-1, 64)), numbers(2, 32, 64))
    assert (read, writes) == ([[(64, 64)]], 0)


def shared(w: Tensor) -> tuple[Tensor, ...]:
    narrow = cast(w)
    return (*both(narrow), narrow)


KEPT = {
    "that others read": shared,
    "of a computed tensor": lambda w: both(cast(w * 2)),
    "of a transpose": lambda w: both(cast(w.mT)),
    "of 16 bits": lambda w: both(cast(w.half())),
}


@pytest.mark.parametrize("case", KEPT)
def test_other_casts_stay(case):
    graph, _, _ = passed(KEPT[case], numbers(32, 64))
    assert [node.args[0][0].target for node in readers(graph)] == [convert]


def gradients(x: Tensor) -> tuple[Tensor, ...]:
    """Return the results of one operator as of attention's backward: ``[B, H, T, D]`` that lie as ``[B, T, H, D]``."""
    return tuple(part.transpose(1, 2) for part in aten.unbind_copy.int(x))


def stack(*parts: Tensor) -> Tensor:
    """Return a stack as Inductor's graphs express it."""
    return torch.cat(parts).view(len(parts), *parts[0].shape)


def stacked(x: Tensor) -> Tensor:
    """Return the gradient of qkv where q, k, v = qkv.view(B, T, 3, H, D).permute(2, 0, 3, 1, 4)."""
    return stack(*gradients(x)).permute(1, 3, 0, 2, 4).reshape(BATCH * TOKENS, -1)


def side_by_side(x: Tensor) -> Tensor:
    """Return the gradient of qkv where q, k, v = qkv.chunk(3, -1), each cut into heads."""
    return torch.cat([part.transpose(1, 2).reshape(BATCH, TOKENS, -1) for part in gradients(x)], -1).flatten(0, 1)


PARTS = (3, BATCH, TOKENS, HEADS, SIZE)


@pytest.mark.parametrize("concatenated", [stacked, side_by_side])
@pytest.mark.parametrize("quantized", [both, packed, columns])
def test_tensors_in_memory_are_read_without_their_concatenation(concatenated, quantized):
    _, read, writes = passed(lambda x: quantized(concatenated(x)), numbers(*PARTS, dtype=torch.bfloat16))
    assert (read, writes) == ([[(BATCH * TOKENS, HEADS * SIZE)] * 3], 0)


def test_the_amax_still_reads_the_concatenation():
    def scaled(x: Tensor) -> tuple[Tensor, ...]:
        whole = stacked(x)
        return (*both(whole), whole.abs().amax())

    _, read, writes = passed(scaled, numbers(*PARTS, dtype=torch.bfloat16))
    assert read == [[(BATCH * TOKENS, HEADS * SIZE)] * 3]
    assert writes == 2  # Inductor fuses them with the maximum


WHOLE = {
    "of computed tensors": lambda x: (
        stack(*(2 * part for part in gradients(x))).permute(1, 3, 0, 2, 4).reshape(BATCH * TOKENS, -1)
    ),
    "along rows": lambda x: torch.cat([part.flatten(0, 1) for part in gradients(x)]).flatten(1),
    "not side by side": lambda x: stack(*gradients(x)).permute(1, 3, 2, 0, 4).reshape(BATCH * TOKENS, -1),
    "of another layout": lambda x: stack(*gradients(x)).permute(1, 2, 0, 3, 4).reshape(BATCH * HEADS, -1),
    "of many tensors": lambda x: torch.cat([part.flatten(0, 2) for part in (*gradients(x), *gradients(x))], -1),
    "of a split tensor": lambda x: torch.cat([part.flatten(0, 2).flatten(1) for part in x.split(1)], -1),
    "of unequal tensors": lambda x: torch.cat([gradients(x)[0], gradients(x)[1][..., :8]], -1).flatten(0, 2),
}


@pytest.mark.parametrize("case", WHOLE)
def test_other_concatenations_are_read_whole(case):
    _, ((shape, *others),), writes = passed(lambda x: both(WHOLE[case](x)), numbers(*PARTS, dtype=torch.bfloat16))
    assert not others
    assert len(shape) == 2
    assert writes > 0


def test_a_concatenation_viewed_with_other_lines_is_read_whole():
    part = numbers(33, 16, dtype=torch.bfloat16)
    _, read, _ = passed(lambda a, b: both(torch.cat([a, b], -1).view(32, 33)), part, part)
    assert read == [[(32, 33)]]
