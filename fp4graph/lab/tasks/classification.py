"""Image classification: vision transformers of timm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp4graph.errors import Error
from fp4graph.lab.data import images as sources
from fp4graph.lab.data.extras import data_folder, needs
from fp4graph.lab.data.images import Split, seeded
from fp4graph.lab.data.loading import Pixels, Stream, Transform, in_memory
from fp4graph.lab.data.order import Order, WholePasses
from fp4graph.lab.tasks.task import PAPER, Batch, Problem, Recipe, Settings, Task

VIT = "vit_tiny_patch16_224"


class Classification(Problem):
    """Cross-entropy of ``model(images)`` against labels, and the share of images whose highest logit is the label's.

    Args:
        model: the name of a model of timm, which takes ``options``; its weights are a function of the seed alone.
        order: the class that decides the order of the training images.
        mixup: of ``timm.data.Mixup``; None for none.
    """

    def __init__(
        self,
        train: Pixels | Stream,
        held_out: Pixels | Stream,
        settings: Settings,
        model: str,
        *,
        classes: int,
        order: type[Order] = Order,
        mixup: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        self.train, self.held_out = train, held_out
        self.batch_size, self.dtype, self.seed = settings.batch_size, settings.parameter_dtype, settings.seed
        self.order = order(len(train), settings.batch_size, settings.seed)
        self.samples = self.order.samples
        needs("timm", "this task's model is timm's")
        import timm
        from timm.data.mixup import Mixup

        if mixup is not None and settings.batch_size % 2:
            raise Error(f"mixup pairs images: batch size {settings.batch_size} is odd")
        kind: Callable[..., Any] = Mixup
        self.mixup = None if mixup is None else kind(**mixup, num_classes=classes)
        torch.manual_seed(settings.seed)
        self.model = timm.create_model(model, num_classes=classes, **options)

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

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = model(images.to(self.dtype)).float()
        loss = cross_entropy(logits, labels, reduction="none")
        hard = labels if labels.ndim == 1 else labels.argmax(1)  # mixup's labels are distributions
        return {"loss": loss, "accuracy": (logits.argmax(1) == hard).float()}


def transformed(
    split: Split,
    model: str,
    settings: Settings,
    *,
    size: int = 224,
    augmentation: Mapping[str, Any] | None = None,
    crop: float = 0.875,
    **options: Any,
) -> Problem:
    """Return the classification of images that timm reads, cuts to ``size`` pixels and augments.

    Args:
        augmentation: of ``timm.data.create_transform`` for training; None shows every image as validation does.
        crop: share of an image's shorter side that validation sees.
        options: as for :class:`Classification`.
    """
    from timm.data.transforms_factory import create_transform

    plain: dict[str, Any] = {"input_size": size, "mean": split.mean, "std": split.std, "interpolation": "bicubic"}
    still: Any = create_transform(**plain, crop_pct=crop)
    moving: Any = still if augmentation is None else create_transform(**plain, is_training=True, **augmentation)
    parts: tuple[tuple[sources.Images, Transform], ...] = ((split.train, moving), (split.validation, still))
    train, held_out = (Stream(images, how, settings.seed, settings.run.workers) for images, how in parts)
    return Classification(train, held_out, settings, model, classes=split.classes, **options)


def _small(load: Callable[..., Split], data: str | None, settings: Settings, **model: Any) -> Problem:
    """Make a ViT with options ``model``, on the images that ``load`` reads from the folder of ``data``, if any."""
    root = () if data is None else (data_folder(data, settings.run.data),)
    train, held_out, classes = in_memory(load, *root)
    _, channels, size, _ = train.images.shape
    return Classification(train, held_out, settings, VIT, classes=classes, img_size=size, in_chans=channels, **model)


def _augmented(load: Callable[..., Split], data: str | None, size: int, settings: Settings, **options: Any) -> Problem:
    """Make the same of images enlarged to ``size`` pixels, in the order of a shuffling DataLoader."""
    split = load() if data is None else load(data_folder(data, settings.run.data))
    shape: dict[str, Any] = {"img_size": size, "in_chans": split.channels, "patch_size": 4}
    return transformed(split, VIT, settings, size=size, crop=1.0, order=WholePasses, **shape, **options)


def _large(name: str, model: str, settings: Settings, **options: Any) -> Problem:
    """Make a model on the images of a folder in ImageNet's layout, or of Hugging Face's datasets."""
    if settings.run.data is None:
        raise Error(
            f"task {settings.run.task!r} needs {name}: give --data FOLDER with FOLDER/train/CLASS/*.jpg and "
            "FOLDER/val/CLASS/*.jpg, or --data hf:NAME for a dataset of the Hugging Face hub"
        )
    return transformed(sources.named(settings.run.data, labelled=True), model, settings, **options)


#: Touvron et al. 2021, "Training data-efficient image transformers", Table 9, without its repeated augmentation; Liu et
#: al. 2021, "Swin Transformer", sec. A2.1. (What both say of colour jitter has no effect beside RandAugment.)
AUGMENTED: dict[str, Any] = {
    "augmentation": {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"},
    "mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1},
}
SOURCE = f"{PAPER}; the model is ours, for the paper names none"
DOWNLOADED = "FOLDER; downloaded if it has none"
FOLDERS = "FOLDER (train/CLASS/*.jpg, val/CLASS/*.jpg) or hf:NAME"
# A 6 and a mirrored 6 are not the same class: no flip, and crops that lose no stroke.
_OF_DIGITS = {"scale": (0.7, 1.0), "ratio": (0.9, 1.1), "hflip": 0.0, "color_jitter": None}
_OF_CIFAR10 = {"scale": (0.5, 1.0), "hflip": 0.5, "color_jitter": None, "auto_augment": "rand-m5-mstd0.5-inc1"}
_task = partial(Task, family="classification")
_AUGMENTED_RECIPE = partial(Recipe, optimizer="adamw", weight_decay=0.05, schedule="timm")


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
        make=partial(_large, "ImageNet-1K", model, drop_path_rate=drop_path, **AUGMENTED),
        data=FOLDERS,
    )  # fmt: skip


TASKS = (
    _task(
        name="digits",
        description="A ViT of 2 blocks on scikit-learn's 1797 scans of handwritten digits, 8x8 pixels",
        source="ours",
        recipe=Recipe(lr=2e-3, batch_size=64, epochs=20),
        make=partial(_small, sources.digits, None, patch_size=2, embed_dim=64, depth=2, num_heads=2),
        embedded=True,
    ),
    _task(
        name="digits-augmented",
        description="A ViT of 2 blocks on the same digits, enlarged to 16x16 and cropped at random",
        source="ours",
        recipe=_AUGMENTED_RECIPE(lr=2e-3, batch_size=64, epochs=24, warmup=1 / 24, validations=24),
        make=partial(_augmented, sources.digits, None, 16, augmentation=_OF_DIGITS, embed_dim=96, depth=2, num_heads=3),
        embedded=True,
    ),
    _task(
        name="mnist",
        description="A ViT of 4 blocks on MNIST",
        source=SOURCE,
        recipe=Recipe(lr=1e-3, batch_size=512, epochs=20),
        make=partial(_small, sources.mnist, "mnist", patch_size=4, embed_dim=128, depth=4, num_heads=4),
        data=DOWNLOADED,
    ),
    _task(
        name="cifar10",
        description="A ViT-Tiny of 6 blocks on CIFAR-10",
        source=SOURCE,
        recipe=Recipe(lr=1e-3, batch_size=512, epochs=20),
        make=partial(_small, sources.cifar10, "cifar10", patch_size=4, depth=6),
        data=DOWNLOADED,
    ),
    _task(
        name="cifar10-augmented",
        description="A ViT-Tiny of 6 blocks on CIFAR-10, with RandAugment",
        source="ours",
        recipe=_AUGMENTED_RECIPE(lr=1e-3, batch_size=128, epochs=100, warmup=0.05, validations=100),
        make=partial(_augmented, sources.cifar10, "cifar10", 32, augmentation=_OF_CIFAR10, depth=6),
        data=DOWNLOADED,
    ),
    _task(
        name="imagenet100",
        description="ViT-Tiny on ImageNet-100, 224x224, without augmentation",
        source=SOURCE,
        recipe=Recipe(lr=1e-3, batch_size=512, epochs=20, autocast=True),
        make=partial(_large, "ImageNet-100", VIT),
        data=FOLDERS,
    ),
    _vision_transformer("deit-tiny", "deit_tiny_patch16_224", 0.1, swin=False),
    _vision_transformer("deit-small", "deit_small_patch16_224", 0.1, swin=False),
    _vision_transformer("deit-base", "deit_base_patch16_224", 0.1, swin=False),
    _vision_transformer("swin-tiny", "swin_tiny_patch4_window7_224", 0.2, swin=True),
    _vision_transformer("swin-small", "swin_small_patch4_window7_224", 0.3, swin=True),
)
