"""Image classification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp4graph.experiments.data.order import Order
from fp4graph.experiments.tasks.task import Batch, Problem, Recipe, Settings, Task


class Classification(Problem):
    """Cross-entropy of ``model(images)`` against labels; images that fit in memory, in a new order each epoch."""

    def __init__(self, model: nn.Module, train: Batch, validation: Batch, settings: Settings) -> None:
        self.model, self.batch_size = model, settings.batch_size
        self.train, self.held_out = train, validation
        self.samples = len(train[0])
        self.order = Order(self.samples, settings.batch_size, settings.seed)

    def batches(self, start: int) -> Iterator[Batch]:
        for rows in self.order.rows(start):
            yield tuple(tensor[rows] for tensor in self.train)

    def validation(self) -> Iterator[Batch]:
        yield from zip(*(torch.split(tensor, self.batch_size) for tensor in self.held_out), strict=True)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = model(images).float()
        return {
            "loss": cross_entropy(logits, labels, reduction="none"),
            "accuracy": (logits.argmax(1) == labels).float(),
        }


def _digits(settings: Settings) -> Problem:
    import timm
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    scans = load_digits()
    images = torch.from_numpy(scans.images).float().unsqueeze(1) / 16
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(scans.target).long()
    train, validation = train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    torch.manual_seed(settings.seed)
    shape: dict[str, Any] = {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **shape)
    parts = [(images[rows], labels[rows]) for rows in (train, validation)]
    return Classification(model, parts[0], parts[1], settings)


DIGITS = Task(
    name="digits",
    family="classification",
    description="A small ViT on scikit-learn's 1797 scans of handwritten digits, 8x8 pixels",
    source="scikit-learn's digits, which come with it",
    recipe=Recipe(lr=2e-3, batch_size=64, epochs=20),
    make=_digits,
    embedded=True,
)
