"""Image classification: vision transformers of timm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp4graph.errors import Error
from fp4graph.experiments.data import images as sources
from fp4graph.experiments.data.extras import data_folder, needs
from fp4graph.experiments.data.images import Split, seeded
from fp4graph.experiments.data.loading import Pixels, Stream, Transform, in_memory, normalized
from fp4graph.experiments.data.order import Order, WholePasses
from fp4graph.experiments.tasks.task import Batch, Problem, Recipe, Settings, Task


class Classification(Problem):
    """Cross-entropy of ``model(images)`` against labels, and the share of images whose highest logit is the label's."""

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = model(images.to(self.dtype)).float()
        loss = cross_entropy(logits, labels, reduction="none")
        hard = labels if labels.ndim == 1 else labels.argmax(1)  # mixup's labels are distributions
        return {"loss": loss, "accuracy": (logits.argmax(1) == hard).float()}


class InMemory(Classification):
    """Classification of images in memory, without augmentation."""

    def __init__(self, pixels: Pixels, model: str, options: Mapping[str, Any], settings: Settings) -> None:
        self.pixels, self.batch_size, self.dtype = pixels, settings.batch_size, settings.parameter_dtype
        self.samples = len(pixels.train)
        self.order = Order(self.samples, settings.batch_size, settings.seed)
        channels, size, _ = pixels.shape
        shape = {"img_size": size, "in_chans": channels, "num_classes": pixels.split.classes}
        self.model = timm_model(model, settings, **shape, **options)

    def batches(self, start: int) -> Iterator[Batch]:
        for rows in self.order.rows(start):
            yield self._normalized(self.pixels.train[rows]), self.pixels.train_labels[rows]

    def validation(self) -> Iterator[Batch]:
        for rows in torch.split(torch.arange(len(self.pixels.validation)), self.batch_size):
            yield self._normalized(self.pixels.validation[rows]), self.pixels.validation_labels[rows]

    def _normalized(self, pixels: Tensor) -> Tensor:
        return normalized(pixels, self.pixels.split.mean, self.pixels.split.std)


class Transformed(Classification):
    """Classification of images that timm reads, cuts to one size and augments.

    Args:
        augmentation: of ``timm.data.create_transform`` for training; None shows every image as validation does.
        mixup: of ``timm.data.Mixup``; None for none.
        crop: share of an image's shorter side that validation sees.
        order: the class that decides the order of the training images.
    """

    def __init__(
        self,
        split: Split,
        model: str,
        options: Mapping[str, Any],
        settings: Settings,
        *,
        size: int = 224,
        augmentation: Mapping[str, Any] | None = None,
        mixup: Mapping[str, float] | None = None,
        crop: float = 0.875,
        order: type[Order] = Order,
    ) -> None:
        from timm.data.mixup import Mixup
        from timm.data.transforms_factory import create_transform

        plain = {"input_size": size, "mean": split.mean, "std": split.std, "interpolation": "bicubic"}
        still: Transform = create_transform(**plain, crop_pct=crop)  # type: ignore[arg-type]
        moving: Transform = still
        if augmentation is not None:
            moving = create_transform(**plain, is_training=True, **augmentation)  # type: ignore[arg-type]
        self.batch_size, self.dtype, self.seed = settings.batch_size, settings.parameter_dtype, settings.seed
        self.order = order(len(split.train), settings.batch_size, settings.seed)
        self.samples = self.order.samples
        self.train = Stream(split.train, moving, settings.seed, settings.run.workers)
        self.held_out = Stream(split.validation, still, settings.seed, settings.run.workers)
        self.mixup: Callable[..., Any] | None = None
        if mixup is not None:
            if settings.batch_size % 2:
                raise Error(f"mixup pairs images: batch size {settings.batch_size} is odd")
            kind: Callable[..., Callable[..., Any]] = Mixup
            self.mixup = kind(**mixup, num_classes=split.classes)
        self.model = timm_model(model, settings, num_classes=split.classes, **options)

    def batches(self, start: int) -> Iterator[Batch]:
        for number, (images, labels) in enumerate(self.train.shuffled(self.order, start), start):
            if self.mixup is None:
                yield images, labels
            else:
                with seeded(self.seed, number):
                    mixed = self.mixup(images, labels)
                yield tuple(mixed)

    def validation(self) -> Iterator[Batch]:
        yield from map(tuple, self.held_out.in_order(self.batch_size))


def timm_model(name: str, settings: Settings, **options: Any) -> nn.Module:
    """Return a timm model; its weights are a function of the seed alone."""
    needs("timm", "this task's model is timm's")
    import timm

    torch.manual_seed(settings.seed)
    return timm.create_model(name, **options)


# ------------------------------------------------------------------ where the images are


def _root(settings: Settings, name: str) -> Path:
    return Path(settings.data).expanduser() if settings.data else data_folder(name)


def _large(settings: Settings, name: str) -> Split:
    """Return the images of a folder in ImageNet's layout, or of Hugging Face's datasets."""
    if settings.data is None:
        raise Error(
            f"task {settings.run.task!r} needs {name}: give --data FOLDER with FOLDER/train/CLASS/*.jpg and "
            "FOLDER/val/CLASS/*.jpg, or --data hf:NAME for a dataset of the Hugging Face hub"
        )
    if settings.data.startswith("hf:"):
        return sources.hugging_face(settings.data[3:], labelled=True)
    return sources.image_folder(_root(settings, name))


def _digits(settings: Settings) -> Problem:
    options = {"patch_size": 2, "embed_dim": 64, "depth": 2, "num_heads": 2}
    return InMemory(in_memory(sources.digits), "vit_tiny_patch16_224", options, settings)


def _mnist(settings: Settings) -> Problem:
    options = {"patch_size": 4, "embed_dim": 128, "depth": 4, "num_heads": 4}
    return InMemory(in_memory(sources.mnist, _root(settings, "mnist")), "vit_tiny_patch16_224", options, settings)


def _cifar10(settings: Settings) -> Problem:
    options = {"patch_size": 4, "depth": 6}
    return InMemory(in_memory(sources.cifar10, _root(settings, "cifar10")), "vit_tiny_patch16_224", options, settings)


def _transformed(split: Split, size: int, settings: Settings, augmentation: dict[str, Any], **model: Any) -> Problem:
    """Make a ViT-Tiny with options ``model``, on images of ``size`` pixels, in the order of a shuffling DataLoader."""
    shape = {"img_size": size, "in_chans": split.channels, "patch_size": 4}
    return Transformed(
        split, "vit_tiny_patch16_224", shape | model, settings,
        size=size, augmentation=augmentation, crop=1.0, order=WholePasses,
    )  # fmt: skip


def _digits_augmented(settings: Settings) -> Problem:
    # A 6 and a mirrored 6 are not the same class: no flip, and crops that lose no stroke.
    augmentation = {"scale": (0.7, 1.0), "ratio": (0.9, 1.1), "hflip": 0.0, "color_jitter": None}
    return _transformed(sources.digits(), 16, settings, augmentation, embed_dim=96, depth=2, num_heads=3)


def _cifar10_augmented(settings: Settings) -> Problem:
    augmentation = {
        "scale": (0.5, 1.0), "hflip": 0.5, "color_jitter": None, "auto_augment": "rand-m5-mstd0.5-inc1",
    }  # fmt: skip
    return _transformed(sources.cifar10(_root(settings, "cifar10")), 32, settings, augmentation, depth=6)


def _imagenet100(settings: Settings) -> Problem:
    return Transformed(_large(settings, "ImageNet-100"), "vit_tiny_patch16_224", {}, settings)


#: Touvron et al. 2021, "Training data-efficient image transformers", Table 9, without its repeated augmentation; Liu et
#: al. 2021, "Swin Transformer", sec. A2.1. (What both say of colour jitter has no effect beside RandAugment.)
AUGMENTED: dict[str, Any] = {
    "augmentation": {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"},
    "mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1},
}


def _imagenet(model: str, drop_path: float, settings: Settings) -> Problem:
    split = _large(settings, "ImageNet-1K")
    return Transformed(split, model, {"drop_path_rate": drop_path}, settings, **AUGMENTED)


PAPER = '"Elucidating the design space of FP4 training", appendix, Table 11'
PAPER += "; the model is ours, for the paper names none"
DOWNLOADED = "FOLDER; downloaded if it has none"
FOLDERS = "FOLDER (train/CLASS/*.jpg, val/CLASS/*.jpg) or hf:NAME"
_task = partial(Task, family="classification")

DIGITS = _task(
    name="digits",
    description="A ViT of 2 blocks on scikit-learn's 1797 scans of handwritten digits, 8x8 pixels",
    source="ours",
    recipe=Recipe(lr=2e-3, batch_size=64, epochs=20),
    make=_digits,
    embedded=True,
)
MNIST = _task(
    name="mnist",
    description="A ViT of 4 blocks on MNIST",
    source=PAPER,
    recipe=Recipe(lr=1e-3, batch_size=512, epochs=20),
    make=_mnist,
    data=DOWNLOADED,
)
CIFAR10 = _task(
    name="cifar10",
    description="A ViT-Tiny of 6 blocks on CIFAR-10",
    source=PAPER,
    recipe=Recipe(lr=1e-3, batch_size=512, epochs=20),
    make=_cifar10,
    data=DOWNLOADED,
)
_AUGMENTED_RECIPE = partial(Recipe, optimizer="adamw", weight_decay=0.05, schedule="timm")
DIGITS_AUGMENTED = _task(
    name="digits-augmented",
    description="A ViT of 2 blocks on the same digits, enlarged to 16x16 and cropped at random",
    source="ours",
    recipe=_AUGMENTED_RECIPE(lr=2e-3, batch_size=64, epochs=24, warmup=1 / 24, validations=24),
    make=_digits_augmented,
    embedded=True,
)
CIFAR10_AUGMENTED = _task(
    name="cifar10-augmented",
    description="A ViT-Tiny of 6 blocks on CIFAR-10, with RandAugment",
    source="ours",
    recipe=_AUGMENTED_RECIPE(lr=1e-3, batch_size=128, epochs=100, warmup=0.05, validations=100),
    make=_cifar10_augmented,
    data=DOWNLOADED,
)
IMAGENET100 = _task(
    name="imagenet100",
    description="ViT-Tiny on ImageNet-100, 224x224, without augmentation",
    source=PAPER,
    recipe=Recipe(lr=1e-3, batch_size=512, epochs=20, autocast=True),
    make=_imagenet100,
    data=FOLDERS,
)


def _vision_transformer(name: str, model: str, drop_path: float, *, swin: bool) -> Task:
    return _task(
        name=name,
        description=f"{model} on ImageNet-1K, 90 epochs",
        source='"Oscillation-reduced MXFP4 training for vision transformers", sec. 7.1: the recipe of '
        + ("Swin" if swin else "DeiT"),
        recipe=Recipe(
            lr=1e-3, batch_size=1024, epochs=90, optimizer="adamw", weight_decay=0.05, schedule="cosine",
            warmup=(20 if swin else 5) / 90, clip=5.0 if swin else 0.0, autocast=True, validations=90,
        ),
        make=partial(_imagenet, model, drop_path),
        data=FOLDERS,
    )  # fmt: skip


VISION_TRANSFORMERS = (
    _vision_transformer("deit-tiny", "deit_tiny_patch16_224", 0.1, swin=False),
    _vision_transformer("deit-small", "deit_small_patch16_224", 0.1, swin=False),
    _vision_transformer("deit-base", "deit_base_patch16_224", 0.1, swin=False),
    _vision_transformer("swin-tiny", "swin_tiny_patch4_window7_224", 0.2, swin=True),
    _vision_transformer("swin-small", "swin_small_patch4_window7_224", 0.3, swin=True),
)
TASKS = (DIGITS, DIGITS_AUGMENTED, MNIST, CIFAR10, CIFAR10_AUGMENTED, IMAGENET100, *VISION_TRANSFORMERS)
