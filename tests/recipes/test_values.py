"""Every shipped policy by value: y, dX and dW of a linear equal those of a reference written from the papers."""

from __future__ import annotations

import pytest

import fp4graph
from tests.recipes.shipped import POLICIES, REFERENCES, data_for, differences, expected, forms


def test_every_policy_has_a_reference() -> None:
    assert {name for policy in POLICIES for name in forms(fp4graph.load_policy(policy))} == {*REFERENCES}


@pytest.mark.parametrize(("policy", "which"), [(policy, which) for policy in POLICIES for which in data_for(policy)])
def test_values(policy: str, which: str) -> None:
    data = data_for(policy)[which]
    for name, form in forms(fp4graph.load_policy(policy)).items():
        assert differences(policy, form, data, expected(name, data)) == [], name
