"""The environment variables of the GPU's kernels."""

from __future__ import annotations

import pytest

import fp4graph
from fp4graph.kernels import gpu


@pytest.mark.parametrize(("given", "length"), [("0", 0), ("4096", 4096), (" 512 ", 512)])
def test_a_product_length_is_a_whole_number(given: str, length: int) -> None:
    assert gpu.product_length(given) == length


@pytest.mark.parametrize("given", ["abc", "", " ", "-1", "4e3"])
def test_another_product_length_is_refused_with_what_to_set(given: str) -> None:
    with pytest.raises(fp4graph.Error, match=r"FP4GRAPH_PRODUCT_LENGTH is .* set it to .* or unset it"):
        gpu.product_length(given)
