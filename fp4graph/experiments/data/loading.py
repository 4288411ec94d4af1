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
from torch.utils.data import DataLoader, Dataset, Sampler

from fp4graph.experiments.data.images import Images, Split, seeded
from fp4graph.experiments.data.order import Order

if TYPE_CHECKING:
    from PIL import Image

Transform = Callable[["Image.Image"], Tensor]


@dataclass(frozen=True, eq=False)
class Pixels:
    """Images of one size in memory: uint8 ``[N, channels, height, width]``, with labels, int64 ``[N]``."""

    train: Tensor
    train_labels: Tensor
    validation: Tensor
    validation_labels: Tensor
    split: Split

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height, width."""
        _, channels, height, width = self.train.shape
        return channels, height, width


@lru_cache(maxsize=2)  # a sweep trains on one data set many times
def in_memory(load: Callable[..., Split], *root: Path) -> Pixels:
    """Return the images of ``load(*root)`` as tensors."""
    split = load(*root)
    return Pixels(*_tensors(split.train, split.channels), *_tensors(split.validation, split.channels), split)


def _tensors(images: Images, channels: int) -> tuple[Tensor, Tensor]:
    pairs = [images[index] for index in range(len(images))]
    pixels = torch.stack([torch.from_numpy(np.array(image, dtype=np.uint8)) for image, _ in pairs])
    pixels = pixels.view(*pixels.shape[:3], channels).movedim(-1, 1).contiguous()
    return pixels, torch.tensor([label for _, label in pairs])


def normalized(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (pixels/255 - mean)/std per channel, fp32, of uint8 ``pixels``."""
    centre, spread = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (pixels / 255 - centre) / spread


class Stream:
    """Batches of images, read and transformed on the way as a function of seed, image and the batch's key."""

    def __init__(self, images: Images, transform: Transform, seed: int, workers: int) -> None:
        self.images, self.transform, self.seed, self.workers = images, transform, seed, workers

    def shuffled(self, order: Order, start: int) -> Iterator[list[Tensor]]:
        """Yield images ``[batch, channels, height, width]`` and labels ``[batch]``, without end from ``start`` on."""
        yield from self._loader(_Numbered(order, start))

    def in_order(self, batch_size: int) -> Iterator[list[Tensor]]:
        """Yield each image once."""
        numbers = torch.split(torch.arange(len(self.images)), batch_size)
        yield from self._loader([[(0, int(index)) for index in rows] for rows in numbers])

    def _loader(self, batches: Any) -> DataLoader[Any]:
        own = torch.Generator()  # else each loader would draw a number that the model is to draw
        return DataLoader(_Transformed(self), batch_sampler=batches, num_workers=self.workers, generator=own)


class _Transformed(Dataset[Any]):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        image, label = self.stream.images[key[1]]
        with seeded(self.stream.seed, *key):
            return self.stream.transform(image), label


class _Numbered(Sampler[Sequence[tuple[int, int]]]):
    """Indices of samples, each with the key of its batch."""

    def __init__(self, order: Order, start: int) -> None:
        self.order, self.start = order, start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for number, rows in enumerate(self.order.rows(self.start), self.start):
            yield [(self.order.key(number), int(index)) for index in rows]
