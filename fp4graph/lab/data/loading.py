"""Batches of images as tensors: from memory, or read and augmented on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fp4graph.lab.data.images import Images, Split, seeded
from fp4graph.lab.data.order import Order

if TYPE_CHECKING:
    from PIL import Image

Transform = Callable[["Image.Image"], Tensor]


@dataclass(frozen=True, eq=False)
class Pixels:
    """Images in memory, uint8 ``[N, channels, height, width]``, with labels, int64 ``[N]``; batches are normalized."""

    images: Tensor
    labels: Tensor
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.images)

    def shuffled(self, order: Order, start: int) -> Iterator[list[Tensor]]:
        """Yield images ``[batch, channels, height, width]`` and labels ``[batch]``, without end from ``start`` on."""
        yield from map(self._batch, order.rows(start))

    def in_order(self, batch_size: int) -> Iterator[list[Tensor]]:
        """Yield each image once."""
        yield from map(self._batch, torch.split(torch.arange(len(self)), batch_size))

    def _batch(self, rows: Tensor) -> list[Tensor]:
        return [normalized(self.images[rows], self.mean, self.std), self.labels[rows]]


@lru_cache(maxsize=2)  # a sweep trains on one data set many times
def in_memory(load: Callable[..., Split], *root: Path) -> tuple[Pixels, Pixels, int]:
    """Return the training and the validation images of ``load(*root)``, and the number of classes."""
    split = load(*root)
    train, validation = (
        Pixels(*_tensors(part, split), split.mean, split.std) for part in (split.train, split.validation)
    )
    return train, validation, split.classes


def _tensors(images: Images, split: Split) -> tuple[Tensor, Tensor]:
    pairs = [images[index] for index in range(len(images))]
    pixels = torch.stack([torch.from_numpy(np.array(image, dtype=np.uint8)) for image, _ in pairs])
    pixels = pixels.view(*pixels.shape[:3], split.channels).movedim(-1, 1).contiguous()
    return pixels, torch.tensor([label for _, label in pairs])


def normalized(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (pixels/255 - mean)/std per channel, fp32, of uint8 ``pixels``."""
    centre, spread = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (pixels / 255 - centre) / spread


class Stream(Dataset[Any]):
    """Images that are read and transformed on the way, as a function of seed, image and the batch's key.

    The methods are those of :class:`Pixels`.
    """

    def __init__(self, images: Images, transform: Transform, seed: int, workers: int) -> None:
        self.images, self.transform, self.seed, self.workers = images, transform, seed, workers

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        image, label = self.images[key[1]]
        with seeded(self.seed, *key):
            return self.transform(image), label

    def shuffled(self, order: Order, start: int) -> Iterator[list[Tensor]]:
        yield from self._loader((order.key(number), rows) for number, rows in enumerate(order.rows(start), start))

    def in_order(self, batch_size: int) -> Iterator[list[Tensor]]:
        yield from self._loader((0, rows) for rows in torch.split(torch.arange(len(self)), batch_size))

    def _loader(self, batches: Iterator[tuple[int, Tensor]]) -> DataLoader[Any]:
        keys: Any = ([(key, int(index)) for index in rows] for key, rows in batches)
        own = torch.Generator()  # else each loader would draw a number that the model is to draw
        return DataLoader(self, batch_sampler=keys, num_workers=self.workers, generator=own)
