"""Every shipped policy by value: y, dX and dW of a linear equal those of a reference written from the papers."""

from __future__ import annotations

import pytest

from .shipped import POLICIES, REFERENCES, data_for, differences, expected


def test_every_policy_has_a_reference() -> None:
    assert {*POLICIES} == {name for name in REFERENCES if "@" not in name}


@pytest.mark.parametrize(("policy", "which"), [(policy, which) for policy in POLICIES for which in data_for(policy)])
def test_values(policy: str, which: str) -> None:
    data = data_for(policy)[which]
    assert differences(policy, policy, data, expected(policy, data)) == []
