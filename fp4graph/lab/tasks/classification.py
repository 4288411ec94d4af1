"""Image classification with timm's vision transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp4graph.errors import Error, needs
from fp4graph.lab.data import images as sources
from fp4graph.lab.data.images import Split, seeded
from fp4graph.lab.data.loading import Batch, Samples, Streamed, in_memory
from fp4graph.lab.tasks.task import PAPER, Problem, Recipe, Settings, Task

VIT = "vit_tiny_patch16_224"


class Classification(Problem):
    """Cross-entropy of ``model(images)`` against labels, and the accuracy.

    ``model`` names a model of timm, and ``options`` are its arguments; ``mixup`` has arguments of ``timm.data.Mixup``.
    """

    def __init__(
        self, settings: Settings, train: Samples, held_out: Samples, model: str, *, classes: int,
        like_loader: bool = False, mixup: Mapping[str, float] | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(settings, train, held_out, like_loader=like_loader)
        needs("timm", "this task's model is timm's")
        import timm
        from timm.data.mixup import Mixup

        if mixup is not None and settings.batch_size % 2:
            raise Error(f"mixup pairs images, but batch size {settings.batch_size} is odd; give an even one")
        kind: Callable[..., Any] = Mixup
        self.mixup = None if mixup is None else kind(**mixup, num_classes=classes)
        self.model = timm.create_model(model, num_classes=classes, **options)

    def prepared(self, batch: Batch, number: int, training: bool) -> Batch:
        if self.mixup is None or not training:
            return batch
        with seeded(self.seed, number):
            mixed: Batch = self.mixup(*batch)
        return mixed

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, labels = batch
        logits = model(images.to(self.dtype)).float()
        loss = cross_entropy(logits, labels, reduction="none")
        hard = labels if labels.ndim == 1 else labels.argmax(1)  # mixup's labels are distributions
        return {"loss": loss, "accuracy": (logits.argmax(1) == hard).float()}


def transformed(
    split: Split, model: str, settings: Settings, *, size: int = 224, augmentation: Mapping[str, Any] | None = None,
    crop: float = 0.875, **options: Any,
) -> Problem:  # fmt: skip
    """Return the classification of images that timm reads, crops to ``size`` pixels and augments.

    ``augmentation`` has arguments of ``timm.data.create_transform``; None transforms training images like validation
    images, which are cropped to the share ``crop`` of the shorter side. ``options`` are for :class:`Classification`.
    """
    from timm.data.transforms_factory import create_transform

    plain: dict[str, Any] = {"input_size": size, "mean": split.mean, "std": split.std, "interpolation": "bicubic"}
    still: Any = create_transform(**plain, crop_pct=crop)
    moving: Any = still if augmentation is None else create_transform(**plain, is_training=True, **augmentation)
    reading = settings.seed, settings.workers
    train, held_out = Streamed(split.train, moving, *reading), Streamed(split.validation, still, *reading)
    return Classification(settings, train, held_out, model, classes=split.classes, **options)


def _small(load: Callable[..., Split], settings: Settings, **model: Any) -> Problem:
    """Return a ViT with options ``model``, on the images that ``load`` reads."""
    split, train, held_out = in_memory(load, settings.data)
    shape: dict[str, Any] = {"img_size": train.tensors[0].shape[-1], "in_chans": len(split.mean)}
    return Classification(settings, train, held_out, VIT, classes=split.classes, **shape, **model)


def _augmented(load: Callable[..., Split], size: int, settings: Settings, **options: Any) -> Problem:
    """Return a ViT on augmented images enlarged to ``size`` pixels, in the order of a shuffling DataLoader."""
    split = load(settings.data)
    shape: dict[str, Any] = {"img_size": size, "in_chans": len(split.mean), "patch_size": 4}
    return transformed(split, VIT, settings, size=size, crop=1.0, like_loader=True, **shape, **options)


def _large(data: str, model: str, settings: Settings, **options: Any) -> Problem:
    """Return a model on the images of a folder in ImageNet's layout, or of Hugging Face's datasets."""
    split = sources.load(settings.data, f"task {settings.task!r} needs {data}", labelled=True)
    return transformed(split, model, settings, **options)


#: Touvron et al. 2021, "Training data-efficient image transformers", Table 9, without its repeated augmentation; Liu et
#: al. 2021, "Swin Transformer", sec. A2.1. Their colour jitter is left out, because RandAugment disables it.
AUGMENTED: dict[str, Any] = {
    "augmentation": {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.25, "re_mode": "pixel"},
    "mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "label_smoothing": 0.1},
}
SOURCE = f"{PAPER}; the paper names no model, so this project chose one"
DOWNLOADED = "FOLDER, into which missing data is downloaded"
FOLDERS = "FOLDER (train/CLASS/*.jpg, val/CLASS/*.jpg) or hf:NAME"
# A mirrored 6 is not a 6, so digits are not flipped, and crops keep every stroke.
_OF_DIGITS = {"scale": (0.7, 1.0), "ratio": (0.9, 1.1), "hflip": 0.0, "color_jitter": None}
_OF_CIFAR10 = {"scale": (0.5, 1.0), "hflip": 0.5, "color_jitter": None, "auto_augment": "rand-m5-mstd0.5-inc1"}
_task = partial(Task, "classification")
_adamw = partial(Recipe, optimizer="adamw", weight_decay=0.05)


def _vision_transformer(name: str, model: str, drop_path: float) -> Task:
    warmup, clip, kind = (20, 5.0, "Swin") if name.startswith("swin") else (5, 0.0, "DeiT")
    return _task(
        name, f"{model} on ImageNet-1K, 90 epochs",
        _adamw(lr=1e-3, batch_size=1024, epochs=90, schedule="cosine", warmup=warmup / 90, clip=clip, autocast=True,
               validations=90),
        partial(_large, "ImageNet-1K", model, drop_path_rate=drop_path, **AUGMENTED), data=FOLDERS,
        source=f'"Oscillation-reduced MXFP4 training for vision transformers", sec. 7.1: the recipe of {kind}',
    )  # fmt: skip


TASKS = (
    _task("digits", "A ViT of 2 blocks on scikit-learn's 1797 scans of handwritten digits, 8x8 pixels",
          Recipe(lr=2e-3, batch_size=64, epochs=20),
          partial(_small, sources.digits, patch_size=2, embed_dim=64, depth=2, num_heads=2), embedded=True),
    _task("digits-augmented", "A ViT of 2 blocks on scikit-learn's digits, enlarged to 16x16 and cropped at random",
          _adamw(lr=2e-3, batch_size=64, epochs=24, schedule="timm", warmup=1 / 24, validations=24),
          partial(_augmented, sources.digits, 16, augmentation=_OF_DIGITS, embed_dim=96, depth=2, num_heads=3),
          embedded=True),
    _task("mnist", "A ViT of 4 blocks on MNIST", Recipe(lr=1e-3, batch_size=512, epochs=20),
          partial(_small, sources.mnist, patch_size=4, embed_dim=128, depth=4, num_heads=4),
          source=SOURCE, data=DOWNLOADED),
    _task("cifar10", "A ViT-Tiny of 6 blocks on CIFAR-10", Recipe(lr=1e-3, batch_size=512, epochs=20),
          partial(_small, sources.cifar10, patch_size=4, depth=6), source=SOURCE, data=DOWNLOADED),
    _task("cifar10-augmented", "A ViT-Tiny of 6 blocks on CIFAR-10, with RandAugment",
          _adamw(lr=1e-3, batch_size=128, epochs=100, schedule="timm", warmup=0.05, validations=100),
          partial(_augmented, sources.cifar10, 32, augmentation=_OF_CIFAR10, depth=6), data=DOWNLOADED),
    _task("imagenet100", "ViT-Tiny on ImageNet-100, 224x224, without augmentation",
          Recipe(lr=1e-3, batch_size=512, epochs=20, autocast=True),
          partial(_large, "ImageNet-100", VIT), source=SOURCE, data=FOLDERS),
    _vision_transformer("deit-tiny", "deit_tiny_patch16_224", 0.1),
    _vision_transformer("deit-small", "deit_small_patch16_224", 0.1),
    _vision_transformer("deit-base", "deit_base_patch16_224", 0.1),
    _vision_transformer("swin-tiny", "swin_tiny_patch4_window7_224", 0.2),
    _vision_transformer("swin-small", "swin_small_patch4_window7_224", 0.3),
)  # fmt: skip
