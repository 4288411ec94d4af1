"""The pass without a graph: the operations of an uncompiled forward are read as Dynamo's are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.models import module_of
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, assert_equal, operation_by_operation

#: Operators of Python for which torch calls a function around a method of C, or a function of its own.
OPERATORS = {
    "**": lambda x: x**2,
    "** of a number": lambda x: 2**x,
    "**=": lambda x: (x * 1).__ipow__(2),
    "//": lambda x: x // 0.5,
    "% of a number": lambda x: 2 % x,
    "number - x": lambda x: 1 - x,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_uncompiled_forward_runs_the_operators_of_python(name):
    def forward(self, x):
        return self.second(OPERATORS[name](self.first(x)))

    results = []
    for uncompiled in (True, False):
        torch.manual_seed(0)
        model = applied(module_of(forward, first=nn.Linear(32, 32), second=nn.Linear(32, 8)), one_rule())
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
        if uncompiled:
            with operation_by_operation():
                results.append(model(x))
        else:
            results.append(model(x))
    assert_equal(results[:1], results[1:])
