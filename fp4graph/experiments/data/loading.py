"""Batches of images as tensors: from memory, or read and augmented on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from fp4graph.experiments.data.images import Images, Split, seeded
from fp4graph.experiments.data.order import Order

Transform = Callable[[Image.Image], Tensor]


@lru_cache(maxsize=2)  # a sweep trains on one data set many times
def in_memory(load: Callable[[], Split]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images, labels) to train and to validate on: fp32 ``[N, channels, height, width]``, normalized, and int64."""
    from torchvision.transforms.functional import pil_to_tensor

    split = load()
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (split.mean, split.std))

    def tensors(images: Images) -> tuple[Tensor, Tensor]:
        pairs = [images[index] for index in range(len(images))]
        pixels = torch.stack([pil_to_tensor(image) for image, _ in pairs])
        return (pixels / 255 - mean) / std, torch.tensor([label for _, label in pairs])

    return tensors(split.train), tensors(split.validation)


class Stream:
    """Batches of images too many for memory; what becomes of an image is a function of (seed, batch, image)."""

    def __init__(self, images: Images, transform: Transform, seed: int, workers: int) -> None:
        self.images, self.transform, self.seed, self.workers = images, transform, seed, workers

    def shuffled(self, order: Order, start: int) -> Iterator[list[Tensor]]:
        """Without end, from batch ``start`` on: images ``[batch, channels, height, width]`` and labels ``[batch]``."""
        yield from self._loader(_Numbered(order, start))

    def in_order(self, batch_size: int) -> Iterator[list[Tensor]]:
        """Each image once."""
        numbers = torch.arange(len(self.images)).split(batch_size)
        yield from self._loader([[(0, int(index)) for index in rows] for rows in numbers])

    def _loader(self, batches: Any) -> DataLoader[Any]:
        return DataLoader(_Transformed(self), batch_sampler=batches, num_workers=self.workers)


class _Transformed(Dataset[Any]):
    def __init__(self, stream: Stream) -> None:
        self.stream = stream

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        image, label = self.stream.images[key[1]]
        with seeded(self.stream.seed, *key):
            return self.stream.transform(image), label


class _Numbered(Sampler[Sequence[tuple[int, int]]]):
    """Indices together with the number of their batch."""

    def __init__(self, order: Order, start: int) -> None:
        self.order, self.start = order, start

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for number, rows in enumerate(self.order.rows(self.start), self.start):
            yield [(number, int(index)) for index in rows]
