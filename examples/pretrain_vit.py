"""Pre-train any timm model under several fp4graph policies and compare them.

    python examples/pretrain_vit.py                       # handwritten digits, four policies
    python examples/pretrain_vit.py --data cifar10 --download --policies bf16,tetrajet --amp bf16
    python examples/pretrain_vit.py --data imagefolder:/data/imagenet --amp bf16 --workers 8
    torchrun --standalone --nproc-per-node 2 examples/pretrain_vit.py   # the same batches, divided among processes

A run can be killed at any moment: started again with --resume it goes on from the last whole epoch of each policy, to
the last bit as if nothing had happened.

Every policy starts from the same weights and sees the same pixels in the same order. Time per step is a median over
the training steps after the first few, which compile: forward, backward and optimizer, without data loading.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import typer
import vision_data
from common import (
    Amp,
    Backend,
    ExampleError,
    Processes,
    autocast,
    device_named,
    first_console,
    print_error,
    processes,
    synchronize,
)
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from vision_report import Run, closing_table, plot, write_log

import fp4graph
from fp4graph.training import checkpoint

#: The baseline, and three recipes of ever more help.
DEFAULT = "bf16,microscaling,tetrajet,tetrajet-qema"
#: Training steps left out of the timing: they compile, and fill caches.
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Settings:
    """All that runs of different policies share; what the command line left out comes from the data set's recipe."""

    data: str
    model: str
    model_kwargs: dict[str, Any]
    epochs: int
    batch_size: int
    lr: float
    weight_decay: float
    warmup_epochs: int
    img_size: int
    seed: int
    backend: str
    device: str
    amp: str
    workers: int
    grad_checkpointing: bool
    limit_steps: int | None

    def title(self, here: Processes) -> str:
        """What the table and the picture are headed with."""
        precision = {"bf16": "bfloat16 autocast", "fp16": "float16 autocast"}.get(self.amp, "float32")
        device = self.device if here.world == 1 else f"{here.world} × {torch.device(self.device).type}"
        return (
            f"{self.model} on {self.data.partition(':')[0]}, {self.epochs} epochs, {precision} GEMMs, "
            f"{device}, backend {self.backend}"
        )


def build(settings: Settings, split: vision_data.Split) -> nn.Module:
    """The timm model, its weights a function of the seed alone."""
    torch.manual_seed(settings.seed)
    options = {"num_classes": split.classes, "in_chans": split.channels, **settings.model_kwargs}
    try:
        try:
            model = timm.create_model(settings.model, img_size=settings.img_size, **options)
        except TypeError as error:
            if "img_size" not in str(error):
                raise
            torch.manual_seed(settings.seed)
            model = timm.create_model(settings.model, **options)  # a convolutional net takes any size unasked
        if settings.grad_checkpointing:
            model.set_grad_checkpointing(True)
    except (TypeError, ValueError, RuntimeError, AssertionError) as error:
        raise ExampleError(f"timm cannot make {settings.model} with {options}: {error}") from error
    return model.to(settings.device)


def train_policy(
    policy: str,
    settings: Settings,
    split: vision_data.Split,
    recipe: vision_data.Recipe,
    progress: Progress,
    output: Path,
    resume: bool,
    here: Processes,
) -> Run:
    """Train one model under ``policy`` from the common start, or from its checkpoint in ``output``."""
    started = time.perf_counter()
    device = torch.device(settings.device)
    model = build(settings, split)
    train, validation = vision_data.loaders(
        split,
        recipe,
        img_size=settings.img_size,
        batch_size=settings.batch_size,
        seed=settings.seed,
        workers=settings.workers,
        device=device,
        rank=here.rank,
        world=here.world,
    )
    steps = min(len(train), settings.limit_steps or len(train))
    mixup = Mixup(**recipe.mixup, num_classes=split.classes) if recipe.mixup else None

    share = settings.batch_size // here.world
    example = torch.empty(share, split.channels, settings.img_size, settings.img_size, device=device)
    explanation = fp4graph.explain(model, policy, (example,))
    quantized = sum(site.quantized for site in explanation.sites)
    run = Run(explanation.policy.name, explanation.policy.complexity, quantized, len(explanation.sites))

    # The three lines that make a model train under a policy. The rest of this function is an ordinary loop.
    model = fp4graph.apply(model, policy, backend=settings.backend, seed=settings.seed)
    wrapped = DistributedDataParallel(model) if here.world > 1 else model
    optimizer = create_optimizer_v2(model, opt="adamw", lr=settings.lr, weight_decay=settings.weight_decay)
    optimizer = fp4graph.prepare_optimizer(model, optimizer)
    scaler = torch.amp.GradScaler(device.type) if settings.amp == Amp.fp16 else fp4graph.grad_scaler(model)

    scheduler, epochs = create_scheduler_v2(
        optimizer,
        sched="cosine",
        num_epochs=settings.epochs,
        warmup_epochs=settings.warmup_epochs,
        warmup_lr=1e-6,
        min_lr=settings.lr / 100,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    file = output / f"{run.policy}.pt"
    if resume and file.exists():
        saved = checkpoint.load(file, wrapped, optimizer, scaler=scaler)
        if _kept(saved["settings"]) != _kept(asdict(settings)):
            raise ExampleError(f"{file} is of a run with other options: {saved['settings']}")
        run = Run(**saved["run"])
    finished = len(run.train_loss)
    task = progress.add_task(policy, total=epochs * steps, completed=finished * steps, status="compiling")
    seconds: list[float] = []
    for epoch in range(finished, epochs):
        vision_data.start_epoch(train, settings.seed, epoch)
        wrapped.train()
        losses = []
        for step, (images, labels) in zip(range(steps), train, strict=False):
            if step == 0:
                vision_data.part_ways(settings.seed, epoch, here.rank)
            images, labels = images.to(device), labels.to(device)
            if mixup is not None:
                images, labels = mixup(images, labels)
            scheduler.step_update(epoch * steps + step)
            synchronize(device)
            begin = time.perf_counter()
            with autocast(settings.amp, settings.device):
                loss = cross_entropy(wrapped(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            synchronize(device)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.detach())
            progress.advance(task)
        run.train_loss.append(here.mean(torch.stack(losses).mean()))
        validation_loss, top1 = evaluate(wrapped, validation, settings, here)
        run.validation_loss.append(validation_loss)
        run.top1.append(top1)
        status = f"loss {run.train_loss[-1]:.3f}, val. {validation_loss:.3f}, top-1 {100 * top1:.1f} %"
        progress.update(task, status=status)
        if not progress.console.is_terminal:  # no bar there: one line an epoch instead
            progress.console.print(f"{policy}: epoch {epoch + 1}/{epochs}, {status}", highlight=False)
        run.first_step_seconds = seconds[0]
        run.step_seconds = statistics.median(seconds[WARM_UP_STEPS:]) if len(seconds) > WARM_UP_STEPS else None
        run.total_seconds += time.perf_counter() - started
        started = time.perf_counter()
        saved = {"settings": asdict(settings), "run": asdict(run)}
        checkpoint.save(file, wrapped, optimizer, scaler=scaler, progress=saved)
    return run


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, settings: Settings, here: Processes) -> tuple[float, float]:
    """(mean cross-entropy, share of top-1 hits) over the validation images of all processes."""
    model.eval()
    loss, hits, count = 0.0, 0, 0
    for batch, (images, labels) in enumerate(loader):
        if batch == settings.limit_steps:
            break
        images, labels = images.to(settings.device), labels.to(settings.device)
        with autocast(settings.amp, settings.device):
            logits = model(vision_data.padded(images, settings.batch_size // here.world))
        logits = logits[: len(labels)].float()
        loss += cross_entropy(logits, labels, reduction="sum").item()
        hits += int((logits.argmax(1) == labels).sum())
        count += len(labels)
    loss, hits, count = here.sums(loss, hits, count, device=settings.device)
    return loss / count, hits / count


def pretrain(
    policies: list[str],
    settings: Settings,
    split: vision_data.Split,
    recipe: vision_data.Recipe,
    output: Path,
    console: Console,
    resume: bool,
    here: Processes,
) -> list[Run]:
    """Train under each policy in turn; log and picture are brought up to date after each."""
    for policy in policies:  # a misspelt fourth policy should not cost three trainings
        fp4graph.load_policy(policy)
    output.mkdir(parents=True, exist_ok=True)
    context = {
        "settings": asdict(settings),
        "processes": here.world,
        "versions": {"fp4graph": fp4graph.__version__, "torch": torch.__version__, "timm": timm.__version__},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "timing": f"step_seconds: median, first {WARM_UP_STEPS} steps left out, data loading not counted",
    }
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    runs: list[Run] = []
    with Progress(
        *bar, TextColumn("{task.fields[status]}"), console=console,
        disable=not console.is_terminal or not here.first,
    ) as progress:  # fmt: skip
        for policy in policies:
            runs.append(train_policy(policy, settings, split, recipe, progress, output, resume, here))
            if here.first:
                write_log(runs, context, output / "log.json")
                plot(runs, settings.title(here), output / "loss.png")
    return runs


def check_shares(settings: Settings, recipe: vision_data.Recipe, here: Processes) -> None:
    """Refuse a batch that the processes, or mixup, cannot divide."""
    if settings.batch_size % here.world:
        raise ExampleError(f"--batch-size {settings.batch_size} cannot be shared by {here.world} processes")
    share = settings.batch_size // here.world
    if recipe.mixup and share % 2:
        raise ExampleError(f"--batch-size {settings.batch_size} is {share} per process: mixup needs an even number")


def parse_model_kwargs(pairs: list[str]) -> dict[str, Any]:
    """``["depth=4", "class_token=false"]`` as keyword arguments; values are JSON where they can be, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (equals and name.isidentifier()):
            raise ExampleError(f"--model-kwargs takes name=value, not {pair!r}")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help="Pre-train a timm model under several policies and compare them.")
def main(
    policies: Annotated[
        list[str] | None, typer.Option(help=f"Names or files; repeat the option or put commas between. [{DEFAULT}]")
    ] = None,
    data: Annotated[str, typer.Option(help="digits, cifar10 or imagefolder:PATH.")] = "digits",
    model: Annotated[str | None, typer.Option(help="Any timm model.")] = None,
    model_kwargs: Annotated[list[str] | None, typer.Option(help="name=value for timm.create_model.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1)] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Of all processes.")] = None,
    lr: Annotated[float | None, typer.Option(min=0)] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0)] = None,
    warmup_epochs: Annotated[int | None, typer.Option(min=0)] = None,
    img_size: Annotated[int | None, typer.Option(min=1)] = None,
    patch_size: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    backend: Annotated[Backend, typer.Option(help="Of torch.compile.")] = Backend.inductor,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto takes CUDA where there is one.")] = "auto",
    amp: Annotated[Amp, typer.Option(help="Autocast; none trains in float32.")] = Amp.none,
    workers: Annotated[int, typer.Option(min=0, help="Processes that load data, for each that trains.")] = 0,
    grad_checkpointing: Annotated[bool, typer.Option("--grad-checkpointing", help="Recompute activations.")] = False,
    data_root: Annotated[Path, typer.Option(help="Where cifar10 is kept.")] = Path("runs/data"),
    download: Annotated[bool, typer.Option("--download", help="Let torchvision fetch cifar10.")] = False,
    limit_steps: Annotated[int | None, typer.Option(min=1, help="Cut every epoch short, for a trial.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints in --output.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of log, picture, checkpoints.")] = Path("runs/pretrain_vit"),
) -> None:
    console = first_console()
    try:
        with processes(device_named(device)) as (here, own_device):
            if download and not here.first:  # the first process fetches for all
                here.wait()
            recipe, split = vision_data.load(data, root=data_root, download=download)
            if download and here.first:
                here.wait()
            # The recipe's model options belong to its model.
            options = dict(recipe.model_kwargs) if model is None else {}
            if patch_size is not None:
                options["patch_size"] = patch_size
            settings = Settings(
                data=data,
                model=model or recipe.model,
                model_kwargs={**options, **parse_model_kwargs(model_kwargs or [])},
                epochs=_or(epochs, recipe.epochs),
                batch_size=_or(batch_size, recipe.batch_size),
                lr=_or(lr, recipe.lr),
                weight_decay=_or(weight_decay, recipe.weight_decay),
                warmup_epochs=_or(warmup_epochs, recipe.warmup_epochs),
                img_size=_or(img_size, recipe.img_size),
                seed=seed,
                backend=backend.value,
                device=own_device,
                amp=amp.value,
                workers=workers,
                grad_checkpointing=grad_checkpointing,
                limit_steps=limit_steps,
            )
            check_shares(settings, recipe, here)
            chosen = [name.strip() for text in policies or [DEFAULT] for name in text.split(",") if name.strip()]
            runs = pretrain(chosen, settings, split, recipe, output, console, resume, here)
    except (ExampleError, fp4graph.Error) as error:
        print_error(error)
        raise typer.Exit(1) from None
    console.print(closing_table(runs, settings.title(here)))
    console.print(
        f"ms/step: median after the first {WARM_UP_STEPS} steps, data loading left out; 1st step: with compilation",
        "train, val.: cross-entropy of the last epoch; sites: matrix products quantized, of all in the graph",
        f"log: {output / 'log.json'}, picture: {output / 'loss.png'}",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )


def _kept(settings: dict[str, Any]) -> dict[str, Any]:
    """What a resumed run must agree on; each process has a device of its own."""
    return {**settings, "device": torch.device(settings["device"]).type}


def _or(given: Any, default: Any) -> Any:
    return default if given is None else given


if __name__ == "__main__":
    app()
