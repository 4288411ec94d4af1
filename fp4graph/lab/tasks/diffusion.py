"""Image generation: U-Nets of diffusers that learn the noise of denoising diffusion."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.lab.data import images as sources
from fp4graph.lab.data.extras import data_folder, needs
from fp4graph.lab.data.images import Split
from fp4graph.lab.data.loading import Pixels, Stream, in_memory
from fp4graph.lab.data.order import Order, generator
from fp4graph.lab.tasks.task import PAPER, Batch, Problem, Recipe, Settings, Task

#: Steps of the noise schedule.
TIMESTEPS = 1000


class Diffusion(Problem):
    """ε from √ᾱ_t·x + √(1 - ᾱ_t)·ε, with images x in [-1, 1], ε ~ N(0, 1) of their shape, t uniform over the schedule.

    The loss is the squared error of the predicted ε, averaged over an image. Noise and t of a training batch are a
    function of the seed and the batch's number, those of validation the same each time.

    Source: Ho et al. 2020, "Denoising Diffusion Probabilistic Models", eq. 14; diffusers' linear schedule.
    """

    def __init__(
        self, train: Pixels | Stream, held_out: Pixels | Stream, settings: Settings, channels: int, **model: Any
    ) -> None:
        needs("diffusers", "this task's model is diffusers'")
        import diffusers

        self.train, self.held_out, self.samples = train, held_out, len(train)
        self.seed, self.batch_size, self.dtype = settings.seed, settings.batch_size, settings.parameter_dtype
        self.order = Order(self.samples, settings.batch_size, settings.seed)
        torch.manual_seed(settings.seed)
        self.model = diffusers.UNet2DModel(in_channels=channels, out_channels=channels, **model)
        # The blocks differ in kind and width, so that they are no stack that is found by itself.
        names = (name for name, _ in self.model.named_modules())
        self.blocks = tuple(name for name in names if re.fullmatch(r"mid_block|(down|up)_blocks\.[^.]+", name))
        kept = diffusers.DDPMScheduler(num_train_timesteps=TIMESTEPS).alphas_cumprod
        self.signal, self.noise = kept.sqrt(), (1 - kept).sqrt()

    def batches(self, start: int) -> Iterator[Batch]:
        for number, (images, _) in enumerate(self.train.shuffled(self.order, start), start):
            yield self.noised(images, self.seed, 1, number)

    def validation(self) -> Iterator[Batch]:
        for number, (images, _) in enumerate(self.held_out.in_order(self.batch_size)):
            yield self.noised(images, number)

    def noised(self, images: Tensor, *key: int) -> Batch:
        """Return ``images``, their noise and timesteps, which are a function of ``key``."""
        random = generator(*key)
        noise = torch.randn(images.shape, generator=random)
        return images, noise, torch.randint(TIMESTEPS, (len(images),), generator=random)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, noise, timesteps = batch
        signal, spread = (part.to(images.device)[timesteps].view(-1, 1, 1, 1) for part in (self.signal, self.noise))
        noisy = signal * images + spread * noise
        predicted = model(noisy.to(self.dtype), timesteps, return_dict=False)[0]
        return {"loss": (predicted.float() - noise).square().mean((1, 2, 3))}


def from_folder(split: Split, settings: Settings, size: int, **model: Any) -> Problem:
    """Return the diffusion of images in files, cut to squares of ``size`` pixels and mirrored at random."""
    from torchvision import transforms

    cut = [transforms.Resize(size), transforms.CenterCrop(size)]
    scaled = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
    moving = transforms.Compose([*cut, transforms.RandomHorizontalFlip(), *scaled])
    parts = ((split.train, moving), (split.validation, transforms.Compose([*cut, *scaled])))
    train, held_out = (Stream(images, how, settings.seed, settings.run.workers) for images, how in parts)
    return Diffusion(train, held_out, settings, channels=3, sample_size=size, **model)


def _small(load: Callable[..., Split], data: str | None, settings: Settings, **model: Any) -> Problem:
    """Make a U-Net with options ``model``, on the images that ``load`` reads from the folder of ``data``, if any."""
    root = () if data is None else (data_folder(data, settings.run.data),)
    train, held_out = (replace(part, mean=(0.5,), std=(0.5,)) for part in in_memory(load, *root)[:2])
    _, channels, size, _ = train.images.shape
    return Diffusion(train, held_out, settings, channels, sample_size=size, layers_per_block=1, **model)


def _big(settings: Settings) -> Problem:
    if settings.run.data is None:
        raise Error(
            f"task {settings.run.task!r} needs FFHQ: give --data FOLDER with its images as .png or .jpg, in any "
            "subfolders, or --data hf:NAME for a dataset of the Hugging Face hub"
        )
    return from_folder(
        sources.named(settings.run.data, labelled=False),
        settings,
        size=128,
        block_out_channels=(128, 128, 256, 256, 512, 512),
        down_block_types=(*["DownBlock2D"] * 4, "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", *["UpBlock2D"] * 4),
        layers_per_block=2,
    )


_task = partial(Task, family="diffusion")
TASKS = (
    _task(
        name="digits-diffusion",
        description="A U-Net of 2 levels on scikit-learn's digits, 8x8 pixels",
        source="ours",
        recipe=Recipe(lr=1e-3, batch_size=64, epochs=10),
        make=partial(
            _small,
            sources.digits,
            None,
            block_out_channels=(32, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
            attention_head_dim=16,
        ),
        embedded=True,
    ),
    _task(
        name="small-diffusion",
        description="A U-Net of 3 levels on CIFAR-10",
        source=f"{PAPER}; the model's size is ours, for the paper gives none",
        recipe=Recipe(lr=1e-3, batch_size=512, epochs=20),
        make=partial(
            _small,
            sources.cifar10,
            "cifar10",
            block_out_channels=(64, 128, 128),
            down_block_types=("DownBlock2D", "AttnDownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=32,
        ),
        data="FOLDER; downloaded if it has none",
    ),
    _task(
        name="big-diffusion",
        description="A U-Net of 6 levels on FFHQ, 128x128 pixels",
        source=f"{PAPER}; the model is that of diffusers' tutorial, for the paper gives none",
        recipe=Recipe(lr=1e-4, batch_size=20, epochs=3, autocast=True),
        make=_big,
        data="FOLDER (images) or hf:NAME",
    ),
)
