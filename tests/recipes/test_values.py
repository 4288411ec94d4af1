"""Every shipped policy by value: y, dX and dW of a linear equal those of a reference written from the papers."""

from __future__ import annotations

import pytest

import fp4graph
from tests.recipes.linear import applied, begin_anew, step
from tests.recipes.shipped import POLICIES, REFERENCES, data_for, differences_of, expected, experts_at, forms

pytestmark = pytest.mark.slow
#: The policies that take longest; most are variants of other policies.
LONG = {
    "if4", "nvint4", "quartet", "quartet-ii",
    "mxfp4-full-hadamard", "mxfp4-full-rht", "mxfp4-rht-sr", "nvfp4-te-bf16", "nvfp4-te-bf16-fprop",
    "nvfp4-te-last-blocks", "tetrajet-v2", "ufp4",
}  # fmt: skip


def test_every_policy_has_a_reference() -> None:
    assert {name for policy in POLICIES for name in forms(fp4graph.load_policy(policy))} == {*REFERENCES}


@pytest.mark.filterwarnings("ignore:.*smooth_swiglu.*no effect in this model:fp4graph.PolicyWarning")
@pytest.mark.parametrize("policy", [pytest.param(p, marks=pytest.mark.long if p in LONG else ()) for p in POLICIES])
def test_values(policy: str) -> None:
    for name, form in forms(fp4graph.load_policy(policy)).items():
        model = None
        for which, data in data_for(policy).items():
            if model is None:
                model = applied(form, data, experts_at(name))
            else:
                begin_anew(model, data)
            assert differences_of(policy, step(model, data), data, expected(name, data)) == [], (name, which)
