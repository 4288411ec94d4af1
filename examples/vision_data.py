"""Images for examples/pretrain_vit.py: ``digits`` (in memory), ``cifar10`` and ``imagefolder:PATH``.

What a model sees is a pure function of (seed, epoch, index): every random choice of the augmentation is made under
generators seeded for that one image, so neither the model's own use of randomness nor the number of workers changes
it. Runs that differ in their policy only therefore train on the same pixels in the same order. Several processes
divide each batch of that order among themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ExampleError
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from fp4graph.experiments.data.images import Images, Split, cifar10, digits, image_folder, seeded


@dataclass(frozen=True)
class Recipe:
    """What suits a data set: the defaults of the command line's options, and the augmentation.

    Attributes:
        model_kwargs: of ``timm.create_model``, for ``model`` only.
        augmentation: keyword arguments of ``timm.data.create_transform`` for training images.
        evaluation: the same for validation images.
        mixup: keyword arguments of ``timm.data.Mixup``, or empty for none.
    """

    model: str
    img_size: int
    model_kwargs: dict[str, Any]
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    warmup_epochs: int
    augmentation: dict[str, Any]
    evaluation: dict[str, Any] = field(default_factory=lambda: {"crop_pct": 1.0})
    mixup: dict[str, float] = field(default_factory=dict)


RECIPES = {
    # 8x8 grey digits, enlarged to 16x16, in 16 patches. A 6 and a mirrored 6 are not the same class: no flip, and
    # crops that lose no stroke.
    "digits": Recipe(
        model="vit_tiny_patch16_224",
        img_size=16,
        model_kwargs={"patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 3},
        epochs=24,
        batch_size=64,
        lr=2e-3,
        weight_decay=0.05,
        warmup_epochs=1,
        augmentation={"scale": (0.7, 1.0), "ratio": (0.9, 1.1), "hflip": 0.0, "color_jitter": None},
    ),
    "cifar10": Recipe(
        model="vit_tiny_patch16_224",
        img_size=32,
        model_kwargs={"patch_size": 4, "depth": 6},
        epochs=100,
        batch_size=128,
        lr=1e-3,
        weight_decay=0.05,
        warmup_epochs=5,
        augmentation={"scale": (0.5, 1.0), "hflip": 0.5, "color_jitter": None, "auto_augment": "rand-m5-mstd0.5-inc1"},
    ),
    # Touvron et al. 2021, "Training data-efficient image transformers", Table 9, for one device.
    "imagefolder": Recipe(
        model="deit_tiny_patch16_224",
        img_size=224,
        model_kwargs={},
        epochs=300,
        batch_size=256,
        lr=2.5e-4,
        weight_decay=0.05,
        warmup_epochs=5,
        augmentation={"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"},
        evaluation={"crop_pct": 0.9},
        mixup={"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1},
    ),
}


def load(data: str, *, root: Path, download: bool) -> tuple[Recipe, Split]:
    """The data set that ``--data`` names, with its recipe."""
    name, _, path = data.partition(":")
    if name == "imagefolder" and path:
        return RECIPES[name], image_folder(Path(path).expanduser())
    if data == "cifar10":
        return RECIPES[name], cifar10(root, download=download)
    if data == "digits":
        return RECIPES[name], digits()
    raise ExampleError(f"--data {data!r} is not known: give digits, cifar10 or imagefolder:PATH")


class Augmented(Dataset[tuple[torch.Tensor, int]]):
    """``images`` through ``transform``, which ``timm.data.create_loader`` sets."""

    def __init__(self, images: Images, seed: int) -> None:
        self.images = images
        self.seed = seed
        self.epoch = 0
        self.transform: Callable[[Image.Image], torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.images[index]
        assert self.transform is not None
        with seeded(self.seed, self.epoch, index):
            return self.transform(image), label


class Share(Sampler[list[int]]):
    """Of every batch the part of one process. All must draw the same batches."""

    def __init__(self, batches: Sampler[list[int]], rank: int, world: int) -> None:
        self.batches = batches
        self.rank = rank
        self.world = world

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self.batches:
            begin, end = (len(batch) * number // self.world for number in (self.rank, self.rank + 1))
            yield batch[begin:end]

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]


def loaders(
    split: Split,
    recipe: Recipe,
    *,
    img_size: int,
    batch_size: int,
    seed: int,
    workers: int,
    device: torch.device,
    rank: int = 0,
    world: int = 1,
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Training and validation loaders. Call :func:`start_epoch` before each pass over the first.

    The training loader drops its last, short batch: one shape is one compiled graph. ``batch_size`` is that of all
    ``world`` processes together, whose batches make up those of one process; every process has the same number of
    them, so a share of a last, short one may be empty.
    """
    from timm.data import create_loader

    if len(split.train) < batch_size:
        raise ExampleError(f"--batch-size {batch_size} is more than the {len(split.train)} training images")
    shared: dict[str, Any] = {
        "input_size": (split.channels, img_size, img_size),
        "batch_size": batch_size,
        "interpolation": "bicubic",
        "mean": split.mean,
        "std": split.std,
        "num_workers": workers,
        "persistent_workers": False,  # a worker copies the data set when it starts, and with it the epoch
        "use_prefetcher": False,
        "pin_memory": device.type == "cuda",
    }
    train = create_loader(Augmented(split.train, seed), is_training=True, **shared, **recipe.augmentation)
    validation = create_loader(Augmented(split.validation, seed), is_training=False, **shared, **recipe.evaluation)
    if world > 1:
        return _shared(train, rank, world, shared["input_size"]), _shared(validation, rank, world, shared["input_size"])
    return train, validation


def _shared(loader: DataLoader[Any], rank: int, world: int, shape: tuple[int, ...]) -> DataLoader[Any]:
    return DataLoader(
        loader.dataset,
        batch_sampler=Share(loader.batch_sampler, rank, world),
        collate_fn=partial(_collated, shape),
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
    )


def _collated(shape: tuple[int, ...], samples: list[tuple[torch.Tensor, int]]) -> Any:
    return default_collate(samples) if samples else [torch.empty(0, *shape), torch.empty(0, dtype=torch.int64)]


def start_epoch(loader: DataLoader[Any], seed: int, epoch: int) -> None:
    """Fix the order and the augmentation of the coming pass, and whatever the model draws during it."""
    random.seed(seed + epoch)
    np.random.seed((seed + epoch) % 2**32)
    torch.manual_seed(seed + epoch)
    loader.dataset.epoch = epoch  # type: ignore[attr-defined]


def part_ways(seed: int, epoch: int, rank: int) -> None:
    """Let every process but the first, which goes on as a single one would, draw for mixup and the model on its own.

    To be called when the first batch is there: by then the order of the pass is drawn, and must be that of all.
    """
    if rank:
        words = [int(word) for word in np.random.SeedSequence((seed, epoch, 0, rank)).generate_state(3)]
        random.seed(words[0])
        np.random.seed(words[1])
        torch.manual_seed(words[2])


def padded(images: torch.Tensor, size: int) -> torch.Tensor:
    """A short validation batch filled up with zeros to ``size`` images, so that it meets the compiled shape."""
    return torch.cat([images, images.new_zeros(size - len(images), *images.shape[1:])])
