"""Steps of training a small applied model, and their comparison to the bit."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp4graph

#: Ignores the warning of a test that runs parts of a model, or forwards that Dynamo refuses.
uncompiled = pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")
#: Runs a test compiled, and operation by operation.
stances = pytest.mark.parametrize("stance", ["default", "force_eager"])


@contextmanager
def operation_by_operation() -> Iterator[None]:
    """Run models uncompiled in this context, which saves a test of something else the second that a capture takes. The
    bits are the same: tests/model compares both ways."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*runs uncompiled", fp4graph.PolicyWarning)
        yield


def applied(model: nn.Module, policy: Any, **options: Any) -> nn.Module:
    """Apply a policy to the model, under the backend ``eager`` unless ``options`` say otherwise."""
    result: nn.Module = fp4graph.apply(model, policy, **{"backend": "eager", **options})
    return result


def prepared(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    """Return an optimizer of the model's parameters that is prepared for its policy."""
    return fp4graph.prepare_optimizer(model, kind(model.parameters(), **{"lr": 1e-2, **options}))


def gradients(model: nn.Module) -> list[Tensor]:
    """Return copies of the gradients that the model's parameters have."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def train(
    model: nn.Module, optimizer: Any, batches: Iterable[Sequence[Tensor]], run: Callable[..., Tensor] | None = None
) -> list[Tensor]:
    """Return outputs and gradients of a step for each batch, and weights and state at the end.

    Args:
        run: computes the output from a batch, instead of the model's call.
    """
    results = []
    for batch in batches:
        y = (run or model)(*batch)
        y.square().mean().backward()
        results += [y.detach(), *gradients(model), *(x.grad for x in batch if x.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return results + [value.clone() for value in model.state_dict().values()]


def assert_equal(some: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Compare tensors pairwise, without tolerance. Two NaNs are equal, and so are 0 and -0."""
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def saved_whole(model: nn.Module) -> nn.Module:
    """Return ``model`` after torch has pickled and unpickled it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded
