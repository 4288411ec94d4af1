"""A block length that divides no axis of the model's layers draws a warning: axes are padded with zeros."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.errors import PolicyWarning
from tests.helpers.models import module_of
from tests.helpers.policies import one_rule
from tests.helpers.training import applied

KEEP_DGRAD = {"dgrad": "keep"}


def warned(model: nn.Module, chosen: dict[str, Any]) -> list[str]:
    """Return the warnings of ``explain``, after checking that a forward draws the same."""
    found = []
    for run in (
        lambda: fp4graph.explain(model, chosen, (torch.randn(4, 6, 64),)),
        lambda: applied(model, chosen)(torch.randn(4, 6, 64)),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        found.append([str(each.message) for each in caught if each.category is PolicyWarning])
    assert found[0] == found[1]
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "rule", "sizes"),
    [
        (33, {}, "10, 64, 128"),
        ([1, 33], {}, "10, 64, 128"),
        (48, {"operands": KEEP_DGRAD}, "64, 128"),
        (10, {"operands": KEEP_DGRAD}, "64, 128"),
        (10, {}, None),  # divides the head's outputs
        (32, {}, None),
        (128, {}, None),  # one axis is enough
        ("row", {}, None),
        ("tensor", {}, None),
        (33, {"operands": {"fprop": "keep", "dgrad": "keep"}}, None),  # wgrad contracts tokens
    ],
)
def test_a_block_that_divides_no_axis_draws_a_warning_with_the_sizes(
    block: Any, rule: dict[str, Any], sizes: str | None
) -> None:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    found = warned(model, one_rule(quantize={"block": block}, **rule))
    text = f"rule 'all': a block of {block if block != [1, 33] else 33} divides none of the axes that it quantizes, of "
    assert [f"{text}{sizes} elem" in message for message in found] == ([True] if sizes else [])


@pytest.mark.slow
def test_products_of_activations_draw_no_warning() -> None:
    model = nn.Sequential(nn.Linear(64, 64), module_of(lambda self, x: x @ x.mT @ x))
    assert not warned(model, one_rule(quantize={"block": 33}, match={"op": ["linear", "matmul"]}))


@pytest.mark.slow
def test_the_warning_names_the_rule_and_its_line(tmp_path: Any) -> None:
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nrules:\n  - {name: all, match: {op: linear}, quantize: {block: 33}}\n")
    with pytest.warns(PolicyWarning, match=r"p.yaml:3: rule 'all': a block of 33 divides none"):
        fp4graph.explain(nn.Linear(64, 64), path, (torch.randn(4, 64),))
