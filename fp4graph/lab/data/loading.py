"""Batches of samples, and their order: functions of the seed and the step, also after an interruption."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fp4graph.errors import Error
from fp4graph.lab.data.images import Split, seeded

#: Tensors with the samples along their first axis.
Batch = tuple[Tensor, ...]
#: The rows of each batch, int64 ``[batch]``, with the number that seeds the augmentation of its samples.
Rows = Iterator[tuple[int, Tensor]]


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

    def rows(self, start: int = 0) -> Rows:
        """Yield rows without end, from the batch of number ``start`` on."""
        epoch, begin = divmod(start * self.batch_size, self.samples)
        rest = self._pass(epoch)[begin:]
        while True:
            if len(rest) < self.batch_size:
                epoch += 1
                rest = torch.cat([rest, self._pass(epoch)])
            yield self.key(start), rest[: self.batch_size]
            rest = rest[self.batch_size :]
            start += 1

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


def each_once(samples: int, batch_size: int) -> Rows:
    """Yield the rows of each sample once, in order; the last batch may be shorter."""
    return ((0, rows) for rows in torch.split(torch.arange(samples), batch_size))


class InMemory:
    """Tensors with the samples along their first axis; ``prepare`` makes the first of a batch what a model takes."""

    def __init__(self, first: Tensor, second: Tensor, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        self.first, self.second, self.prepare = first, second, prepare

    def __len__(self) -> int:
        return len(self.first)

    def batches(self, rows: Rows) -> Iterator[Batch]:
        for _, chosen in rows:
            first = self.first[chosen]
            yield first if self.prepare is None else self.prepare(first), self.second[chosen]


class Streamed(Dataset[Any]):
    """Images that are read and transformed on the way, as a function of seed, image and the batch's key."""

    def __init__(self, images: Any, transform: Callable[[Any], Tensor], seed: int, workers: int) -> None:
        self.images, self.transform, self.seed, self.workers = images, transform, seed, workers

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        image, label = self.images[key[1]]
        with seeded(self.seed, *key):
            return self.transform(image), label

    def batches(self, rows: Rows) -> Iterator[Batch]:
        keys: Any = ([(key, int(index)) for index in chosen] for key, chosen in rows)
        own = torch.Generator()  # else each loader would draw a number that the model is to draw
        return map(tuple, DataLoader(self, batch_sampler=keys, num_workers=self.workers, generator=own))


Samples = InMemory | Streamed


@lru_cache(maxsize=2)  # a sweep trains on one data set many times
def in_memory(load: Callable[[str | None], Split], data: str | None) -> tuple[Split, InMemory, InMemory]:
    """Return ``load(data)``, and its images ``[N, channels, height, width]`` to train on and to validate on."""
    split, parts = load(data), []
    for images in (split.train, split.validation):
        pairs = [images[index] for index in range(len(images))]
        pixels = torch.stack([torch.from_numpy(np.array(image, dtype=np.uint8)) for image, _ in pairs])
        pixels = pixels.view(*pixels.shape[:3], len(split.mean)).movedim(-1, 1).contiguous()
        prepare = partial(normalized, mean=split.mean, std=split.std)
        parts.append(InMemory(pixels, torch.tensor([label for _, label in pairs]), prepare))
    train, held_out = parts
    return split, train, held_out


def normalized(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (pixels/255 - mean)/std per channel, fp32, of uint8 ``pixels``."""
    centre, spread = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (pixels / 255 - centre) / spread
