"""Linear regression on Gaussian data: the smallest problem on which FP4 training fails."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from fp4graph.lab.data.loading import Batch, InMemory
from fp4graph.lab.tasks.task import Problem, Recipe, Settings, Task

SAMPLES, FEATURES = 100_000, 1024


class Gaussian(Problem):
    """y = X·w with X ``[samples, features]``, w ``[features, 1]``, all entries iid N(0, 1); one linear layer learns w.

    The last tenth of the samples is for validation. The loss is (y' - y)², whose expectation for weights w' is
    Σ(w' - w)² plus the effect of quantizing X and w'. With bf16 parameters X is bf16 too; y stays fp32.

    Source: "Elucidating the design space of FP4 training", appendix, Tables 3 and 11. The split is this project's.
    """

    def __init__(self, settings: Settings, samples: int = SAMPLES, features: int = FEATURES) -> None:
        self.x, self.w, self.y = _drawn(settings.seed, samples, features)
        cut = samples - samples // 10
        super().__init__(settings, InMemory(self.x[:cut], self.y[:cut]), InMemory(self.x[cut:], self.y[cut:]))
        self.model = nn.Linear(features, 1)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        x, y = batch
        return {"loss": (model(x.to(self.dtype)).float() - y).square().mean(1)}


@lru_cache(maxsize=1)  # a sweep trains many times on one data set
def _drawn(seed: int, samples: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, features, generator=generator)
    w = torch.randn(features, 1, generator=generator)
    return x, w, x @ w


TASKS = (
    Task("regression", "gaussian", f"One linear layer on {SAMPLES:,} Gaussian samples of {FEATURES} features",
         Recipe(lr=1e-2, batch_size=4096, epochs=20, dtype="bf16"), Gaussian, embedded=True,
         source='"Elucidating the design space of FP4 training", appendix, Tables 3 and 11; bf16 parameters'),
)  # fmt: skip
