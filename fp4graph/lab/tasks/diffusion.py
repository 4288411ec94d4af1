"""Image generation: U-Nets of diffusers that learn to predict the noise in denoising diffusion."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fp4graph.errors import needs
from fp4graph.lab.data import images as sources
from fp4graph.lab.data.images import Split
from fp4graph.lab.data.loading import Batch, Samples, Streamed, generator, in_memory
from fp4graph.lab.tasks.task import PAPER, Problem, Recipe, Settings, Task

#: Steps of the noise schedule.
TIMESTEPS = 1000


class Diffusion(Problem):
    """Predicts ε from √ᾱ_t·x + √(1 - ᾱ_t)·ε, for images x in [-1, 1], ε ~ N(0, 1) and t uniform over the schedule.

    The loss is the squared error of the predicted ε, averaged over an image. ε and t of a training batch are a function
    of the seed and the batch's number; in validation they are fixed.

    Source: Ho et al. 2020, "Denoising Diffusion Probabilistic Models", eq. 14; diffusers' linear schedule.
    """

    def __init__(self, settings: Settings, train: Samples, held_out: Samples, channels: int, **model: Any) -> None:
        super().__init__(settings, train, held_out)
        needs("diffusers", "this task's model is diffusers'")
        import diffusers

        self.model = diffusers.UNet2DModel(in_channels=channels, out_channels=channels, **model)
        # The blocks differ in kind and width, so fp4graph does not detect them as a stack.
        names = (name for name, _ in self.model.named_modules())
        self.blocks = tuple(name for name in names if re.fullmatch(r"mid_block|(down|up)_blocks\.[^.]+", name))
        alphas = diffusers.DDPMScheduler(num_train_timesteps=TIMESTEPS).alphas_cumprod
        self.signal, self.noise = alphas.sqrt(), (1 - alphas).sqrt()

    def prepared(self, batch: Batch, number: int, training: bool) -> Batch:
        images, _ = batch
        random = generator(self.seed, 1, number) if training else generator(number)
        noise = torch.randn(images.shape, generator=random)
        return images, noise, torch.randint(TIMESTEPS, (len(images),), generator=random)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        images, noise, timesteps = batch
        signal, spread = (part.to(images.device)[timesteps].view(-1, 1, 1, 1) for part in (self.signal, self.noise))
        noisy = signal * images + spread * noise
        predicted = model(noisy.to(self.dtype), timesteps, return_dict=False)[0]
        return {"loss": (predicted.float() - noise).square().mean((1, 2, 3))}


def _small(load: Callable[..., Split], settings: Settings, **model: Any) -> Problem:
    """Return a U-Net with options ``model``, on the images that ``load`` reads."""
    split, train, held_out = in_memory(load, settings.data, centred=True)
    size = train.tensors[0].shape[-1]
    return Diffusion(settings, train, held_out, len(split.mean), sample_size=size, layers_per_block=1, **model)


def from_folder(settings: Settings, size: int, **model: Any) -> Problem:
    """Return the diffusion of images in files, cropped to squares of ``size`` pixels and mirrored at random."""
    split = sources.load(settings.data, f"task {settings.task!r} needs FFHQ", labelled=False)
    from torchvision import transforms

    cut = [transforms.Resize(size), transforms.CenterCrop(size)]
    scaled = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
    mirrored = transforms.RandomHorizontalFlip()
    parts = (split.train, [*cut, mirrored, *scaled]), (split.validation, [*cut, *scaled])
    train, held_out = (
        Streamed(images, transforms.Compose(steps), settings.seed, settings.workers) for images, steps in parts
    )
    return Diffusion(settings, train, held_out, channels=3, sample_size=size, **model)


def _levels(downwards: str, **options: Any) -> dict[str, Any]:
    """Return options of a U-Net whose levels, from first to last, have attention (A) or have none (-)."""
    down = [{"A": "AttnDownBlock2D", "-": "DownBlock2D"}[kind] for kind in downwards]
    up = [name.replace("Down", "Up") for name in reversed(down)]
    return {"down_block_types": tuple(down), "up_block_types": tuple(up), **options}


_task = partial(Task, "diffusion")
TASKS = (
    _task("digits-diffusion", "A U-Net of 2 levels on scikit-learn's digits, 8x8 pixels",
          Recipe(lr=1e-3, batch_size=64, epochs=10),
          partial(_small, sources.digits, **_levels("-A"), block_out_channels=(32, 32), norm_num_groups=8,
                  attention_head_dim=16),
          embedded=True),
    _task("small-diffusion", "A U-Net of 3 levels on CIFAR-10", Recipe(lr=1e-3, batch_size=512, epochs=20),
          partial(_small, sources.cifar10, **_levels("-AA"), block_out_channels=(64, 128, 128), attention_head_dim=32),
          source=f"{PAPER}; the paper gives no model size, so this project chose one",
          data="FOLDER, into which missing data is downloaded"),
    _task("big-diffusion", "A U-Net of 6 levels on FFHQ, 128x128 pixels",
          Recipe(lr=1e-4, batch_size=20, epochs=3, autocast=True),
          partial(from_folder, size=128, **_levels("----A-"), block_out_channels=(128, 128, 256, 256, 512, 512),
                  layers_per_block=2),
          source=f"{PAPER}; the paper names no model, so the model is that of diffusers' tutorial",
          data="FOLDER (images) or hf:NAME"),
)  # fmt: skip
