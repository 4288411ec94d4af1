"""The order of samples: a function of the seed and the step, also after an interruption."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from fp4graph.errors import Error


def generator(*key: int) -> torch.Generator:
    """Return a generator seeded with ``key``, whole numbers of at least 0."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))


class Order:
    """The rows of each batch: the samples in one random order after another, cut every ``batch_size``.

    No sample is left out of a pass, and all batches have one size: a batch at the end of a pass takes the rest from
    the next one.
    """

    def __init__(self, samples: int, batch_size: int, seed: int) -> None:
        if batch_size > samples:
            raise Error(f"batch size {batch_size} is more than the {samples} training samples")
        self.samples, self.batch_size, self.seed = samples, batch_size, seed

    def rows(self, start: int = 0) -> Iterator[Tensor]:
        """Yield int64 ``[batch_size]`` without end, from the batch of number ``start`` on."""
        epoch, begin = divmod(start * self.batch_size, self.samples)
        rest = self._pass(epoch)[begin:]
        while True:
            if len(rest) < self.batch_size:
                epoch += 1
                rest = torch.cat([rest, self._pass(epoch)])
            yield rest[: self.batch_size]
            rest = rest[self.batch_size :]

    def key(self, batch: int) -> int:
        """Return the number that seeds the augmentation of a batch's samples; each key augments a sample once."""
        return batch

    def _pass(self, epoch: int) -> Tensor:
        return torch.randperm(self.samples, generator=generator(self.seed, epoch))


class WholePasses(Order):
    """Like a shuffling ``DataLoader`` with ``drop_last`` that is seeded with ``seed + epoch`` before each pass.

    No batch has samples of two passes: a short batch at the end of a pass is left out, so ``samples`` counts those
    that a pass shows. The key of a batch is its epoch.
    """

    def __init__(self, samples: int, batch_size: int, seed: int) -> None:
        super().__init__(samples, batch_size, seed)
        self.available, self.samples = samples, samples // batch_size * batch_size

    def key(self, batch: int) -> int:
        return batch * self.batch_size // self.samples

    def _pass(self, epoch: int) -> Tensor:
        drawn = torch.empty(2, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(self.seed + epoch))
        of_sampler = int(drawn[1])  # the loader draws the seed of its workers first
        return torch.randperm(self.available, generator=torch.Generator().manual_seed(of_sampler))[: self.samples]
