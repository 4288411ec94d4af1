"""Operators whose parameters are structures in Python, and flat lists of tensors and numbers for compilers."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fp4graph.numerics import declare
from fp4graph.numerics.declare import Structure, of_flat, operator


class Line(NamedTuple):
    """y = a·x + b."""

    a: Tensor
    b: float


LINE = Structure(("Tensor slope", "float shift"), Line)


def fake(x: Tensor, line: Line, times: int = 1) -> Tensor:
    return torch.empty_like(x)


def run(x: Tensor, line: Line, times: int = 1) -> Tensor:
    assert isinstance(line, Line)
    return times * (line.a * x + line.b)


def flops(x: torch.Size, slope: torch.Size, *rest: Any, **options: Any) -> int:
    return 2 * x.numel()


@pytest.fixture
def library(monkeypatch):
    """Undo the declarations of a test when it ends."""
    fragment = torch.library.Library("fp4graph", "FRAGMENT")
    monkeypatch.setattr(declare, "_library", fragment)
    yield
    fragment._destroy()


@pytest.mark.usefixtures("library")
def test_a_structure_is_one_object_in_python_and_flat_parameters_in_the_schema():
    packet = operator(
        "a_line(Tensor x, Line line, int times=1) -> Tensor",
        fake,
        tags=[torch.Tag.needs_exact_strides],
        flops=flops,
        structures={"Line": LINE},
        CPU=run,
    )
    declared = "fp4graph::a_line(Tensor x, Tensor line_slope, float line_shift, int times=1) -> Tensor"
    assert str(packet.default._schema) == declared
    assert torch.Tag.needs_exact_strides in packet.default.tags
    x, slope = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(2.0)
    assert packet(x, slope, 0.5).tolist() == [2.5, 4.5, 6.5]
    assert packet(x, slope, 0.5, 2).tolist() == [5.0, 9.0, 13.0]
    torch.library.opcheck(packet.default, (x, slope, 0.5, 2))
    with FlopCounterMode(display=False) as counted:
        packet(x, slope, 0.5)
    assert counted.get_total_flops() == 6
    compiled = torch.compile(lambda x: packet(x, slope, 0.5), backend="aot_eager", fullgraph=True)
    assert compiled(x).tolist() == [2.5, 4.5, 6.5]
    assert of_flat("a_line", lambda *arguments: arguments)(1, 2, 3) == (1, Line(2, 3))


@pytest.mark.usefixtures("library")
def test_two_parameters_of_one_structure():
    packet = operator(
        "two_lines(Line first, Line second) -> Tensor",
        lambda first, second: torch.empty_like(first.a),
        structures={"Line": LINE},
        CPU=lambda first, second: first.a * second.b,
    )
    assert packet(torch.tensor(3.0), 1.0, torch.tensor(5.0), 7.0).item() == 21.0
