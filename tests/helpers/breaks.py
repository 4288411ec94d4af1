"""Small models that Dynamo compiles in pieces: the perceptron of ``tests/helpers/models.py``, run in other ways."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.models import Mlp


class Disables(Mlp):
    """Calls ``first`` in a function for which Dynamo is disabled."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _outside(self, x: Tensor) -> Tensor:
        result: Tensor = self.first(x)
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Return what ``Mlp`` returns."""
        result: Tensor = self.second(self.activation(self._outside(x)))
        return result


class Breaks(Mlp):
    """Breaks the graph between its layers."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what ``Mlp`` returns."""
        hidden = self.activation(self.first(x))
        torch._dynamo.graph_break()
        result: Tensor = self.second(hidden)
        return result


class _Logged(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        torch._dynamo.graph_break()
        return y


class Logs(Mlp):
    """Breaks the graph in ``first``, between its product and the end of its own forward."""

    def __init__(self, *options: Any) -> None:
        super().__init__(*options)
        layer = _Logged(self.first.in_features, self.first.out_features)
        layer.load_state_dict(self.first.state_dict())
        self.first = layer


class Looping(nn.Module):
    """Multiplies by its weight in a loop over the values of a tensor, which Dynamo captures in no graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32) / 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return rows ``[N, 32]``."""
        for index in (x[:, 0] > 0).nonzero():
            x = x + nn.functional.linear(x, self.weight) * float(index)
        return x
