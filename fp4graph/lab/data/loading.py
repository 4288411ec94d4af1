"""Batches of samples, and their order; both are functions of the seed and the step, so that runs can resume."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fp4graph.errors import Error
from fp4graph.lab.data.images import Split, seeded

#: Tensors with the samples along their first axis.
Batch = tuple[Tensor, ...]
#: The key that seeds the augmentation of a batch, and the batch's rows, int64 ``[batch]``.
Rows = Iterator[tuple[int, Tensor]]


def generator(*key: int) -> torch.Generator:
    """Return a generator seeded with ``key``, whole numbers of at least 0."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1))


class Order:
    """The rows of each batch: passes over all samples in random order, cut into batches of ``batch_size``.

    A short batch at the end of a pass is filled from the next pass, and a batch's key is its number.

    With ``like_loader`` the rows are those of a ``DataLoader(shuffle=True, drop_last=True)`` that is seeded with
    ``seed + epoch`` before each pass. A short batch is dropped, and ``samples`` does not count its samples. The key of
    a batch is its epoch.
    """

    def __init__(self, samples: int, batch_size: int, seed: int, like_loader: bool = False) -> None:
        if batch_size > samples:
            raise Error(f"batch size {batch_size} exceeds the {samples} training samples; give a smaller one")
        self.available, self.batch_size, self.seed, self.like_loader = samples, batch_size, seed, like_loader
        self.samples = samples // batch_size * batch_size if like_loader else samples

    def rows(self, start: int = 0) -> Rows:
        """Yield rows without end, from the batch of number ``start`` on."""
        epoch, begin = divmod(start * self.batch_size, self.samples)
        rows = self._pass(epoch)[begin:]
        for number in count(start):
            if len(rows) < self.batch_size:
                epoch += 1
                rows = torch.cat([rows, self._pass(epoch)])
            yield epoch if self.like_loader else number, rows[: self.batch_size]
            rows = rows[self.batch_size :]

    def _pass(self, epoch: int) -> Tensor:
        if not self.like_loader:
            return torch.randperm(self.samples, generator=generator(self.seed, epoch))
        drawn = torch.empty(2, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(self.seed + epoch))
        sampler = torch.Generator().manual_seed(int(drawn[1]))  # the first draw of a loader seeds its workers
        return torch.randperm(self.available, generator=sampler)[: self.samples]


class InMemory:
    """Tensors with the samples along their first axis; ``prepare`` converts a batch's first tensor for the model."""

    def __init__(self, *tensors: Tensor, prepare: Callable[[Tensor], Tensor] | None = None) -> None:
        self.tensors, self.prepare = tensors, prepare

    def __len__(self) -> int:
        return len(self.tensors[0])

    def batches(self, rows: Rows) -> Iterator[Batch]:
        for _, chosen in rows:
            first, *others = (tensor[chosen] for tensor in self.tensors)
            yield first if self.prepare is None else self.prepare(first), *others


class Streamed(Dataset[Any]):
    """Images that are read and transformed on demand, as a function of the seed, the image and the batch's key."""

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
        random = torch.Generator()  # without it the loader would draw from torch's global generator, as the model does
        return map(tuple, DataLoader(self, batch_sampler=keys, num_workers=self.workers, generator=random))


Samples = InMemory | Streamed


@lru_cache(maxsize=2)  # a sweep trains many times on one data set
def in_memory(
    load: Callable[[str | None], Split], data: str | None, *, centred: bool = False
) -> tuple[Split, InMemory, InMemory]:
    """Return ``load(data)``, and its training and validation images ``[N, channels, height, width]``.

    Batches are normalized per channel, to (x - mean)/std, or with ``centred`` to [-1, 1].
    """
    from torchvision import transforms

    split, parts = load(data), []
    moments = (0.5, 0.5) if centred else (split.mean, split.std)
    prepare = transforms.Compose([transforms.ConvertImageDtype(torch.float32), transforms.Normalize(*moments)])
    for images in (split.train, split.validation):
        pictures, labels = zip(*(images[index] for index in range(len(images))), strict=True)
        pixels = torch.stack([transforms.functional.pil_to_tensor(picture) for picture in pictures])
        parts.append(InMemory(pixels, torch.tensor(labels), prepare=prepare))
    train, held_out = parts
    return split, train, held_out
