"""Pre-train any timm model under several fp4graph policies and compare them.

    python examples/pretrain_vit.py                                  # scikit-learn's handwritten digits, four policies
    python examples/pretrain_vit.py --data cifar10 --download --policies bf16,tetrajet
    python examples/pretrain_vit.py --data imagefolder:/data/imagenet --model deit_tiny_patch16_224 --amp bf16

Every policy starts from the same weights and sees the same pixels in the same order. Time per step is the median over
the steps after the first two epochs' worth of compilation: forward, backward and optimizer, without data loading.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import timm
import torch
import typer
import vision_data
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch import nn

import fp4graph

#: Steps left out of the timing at the start, and after each change of mode: they compile.
WARM_UP_STEPS = 5


@dataclass
class Run:
    """What one policy came to. Losses are means over an epoch; ``step_seconds`` is a median."""

    policy: str
    complexity: float
    quantized: int
    sites: int
    train_loss: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    top1: list[float] = field(default_factory=list)
    step_seconds: float = float("nan")
    total_seconds: float = 0.0


@dataclass(frozen=True)
class Settings:
    """The options that a run needs, after the data set's recipe has filled in what was not given."""

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


def train_policy(
    policy: str, settings: Settings, split: vision_data.Split, recipe: vision_data.Recipe, progress: Progress
) -> Run:
    """Train one model under ``policy`` from the common start."""
    started = time.perf_counter()
    device = torch.device(settings.device)
    torch.manual_seed(settings.seed)
    model = timm.create_model(
        settings.model, num_classes=split.classes, in_chans=split.channels, img_size=settings.img_size, **settings.model_kwargs
    ).to(device)
    if settings.grad_checkpointing:
        model.set_grad_checkpointing(True)
    train, validation = vision_data.loaders(
        split, recipe, img_size=settings.img_size, batch_size=settings.batch_size, seed=settings.seed,
        workers=settings.workers, device=device,
    )  # fmt: skip
    mixup = Mixup(**recipe.mixup, num_classes=split.classes) if recipe.mixup else None
    criterion = SoftTargetCrossEntropy() if mixup else nn.CrossEntropyLoss()

    example = torch.empty(settings.batch_size, split.channels, settings.img_size, settings.img_size, device=device)
    explanation = fp4graph.explain(model, policy, (example,))
    run = Run(policy, explanation.policy.complexity, explanation.quantized, len(explanation.sites))

    # The three lines that make any model train under a policy.
    model = fp4graph.apply(model, policy, backend=settings.backend, seed=settings.seed)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=settings.lr, weight_decay=settings.weight_decay)
    optimizer = fp4graph.prepare_optimizer(model, optimizer)
    scaler = torch.amp.GradScaler(device.type) if settings.amp == "fp16" else fp4graph.grad_scaler(model)

    scheduler, epochs = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=settings.epochs, warmup_epochs=settings.warmup_epochs, warmup_lr=1e-6, min_lr=1e-5
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.amp)
    autocast = torch.autocast(device.type, dtype) if dtype else nullcontext()
    seconds: list[float] = []
    task = progress.add_task(policy, total=epochs * min(len(train), settings.limit_steps or len(train)), status="compiling")
    for epoch in range(epochs):
        vision_data.start_epoch(train, settings.seed, epoch)
        scheduler.step(epoch)
        model.train()
        losses = []
        for index, (images, labels) in enumerate(train):
            if index == settings.limit_steps:
                break
            images, labels = images.to(device), labels.to(device)
            if mixup is not None:
                images, labels = mixup(images, labels)
            _synchronize(device)
            begin = time.perf_counter()
            with autocast:
                loss = criterion(model(images), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            _synchronize(device)
            seconds.append(time.perf_counter() - begin)
            losses.append(loss.detach())
            progress.advance(task)
        run.train_loss.append(torch.stack(losses).mean().item())
        validation_loss, top1 = evaluate(model, validation, settings, autocast)
        run.validation_loss.append(validation_loss)
        run.top1.append(top1)
        progress.update(task, status=f"loss {run.train_loss[-1]:.3f}  top-1 {100 * top1:.1f} %")
    run.step_seconds = statistics.median(seconds[WARM_UP_STEPS:] or seconds)
    run.total_seconds = time.perf_counter() - started
    return run


@torch.no_grad()
def evaluate(model: nn.Module, loader: Any, settings: Settings, autocast: Any) -> tuple[float, float]:
    """(mean cross-entropy, top-1 share) over the validation images."""
    model.eval()
    total_loss, correct, count = 0.0, 0, 0
    for index, (images, labels) in enumerate(loader):
        if index == settings.limit_steps:
            break
        full = vision_data.padded(images, settings.batch_size).to(settings.device)
        with autocast:
            logits = model(full)[: len(labels)].float()
        labels = labels.to(settings.device)
        total_loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
        count += len(labels)
    return total_loss / count, correct / count


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def closing_table(runs: list[Run]) -> Table:
    """One line a policy; the ratio is to the first policy without quantized sites."""
    baseline = next((run for run in runs if not run.quantized), None)
    table = Table(title="policies compared")
    for column in ("policy", "Ω", "train loss", "val. loss", "top-1", "ms/step", "ratio to bf16", "sites quantized"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for run in runs:
        table.add_row(
            run.policy,
            f"{run.complexity:g}",
            f"{run.train_loss[-1]:.3f}",
            f"{run.validation_loss[-1]:.3f}",
            f"{100 * run.top1[-1]:.1f} %",
            f"{1000 * run.step_seconds:.1f}",
            f"{run.step_seconds / baseline.step_seconds:.2f}" if baseline else "-",
            f"{run.quantized}/{run.sites}",
        )
    return table


def plot(runs: list[Run], file: Path) -> None:
    """Training (dashed) and validation (solid) loss over epochs."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for number, run in enumerate(runs):
        epochs = range(1, len(run.train_loss) + 1)
        axes.plot(epochs, run.validation_loss, color=f"C{number}", label=f"{run.policy} ({100 * run.top1[-1]:.1f} %)")
        axes.plot(epochs, run.train_loss, color=f"C{number}", linestyle="--", linewidth=0.9, alpha=0.7)
    axes.set(xlabel="epoch", ylabel="cross-entropy", yscale="log", title="validation (solid) and training (dashed) loss")
    axes.legend(title="policy (top-1)")
    axes.grid(alpha=0.3, which="both")
    with _replacing(file) as temporary:
        figure.savefig(temporary, dpi=130, format="png")
    plt.close(figure)


class _replacing:  # noqa: N801  # reads as a verb where it is used
    """A temporary path beside ``file`` that takes its place once the block has ended well."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(dir=self.file.parent, prefix=f".{self.file.name}.")
        os.close(handle)
        self.temporary = Path(name)
        return self.temporary

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is None:
            self.temporary.replace(self.file)
        else:
            self.temporary.unlink(missing_ok=True)


def write_log(runs: list[Run], settings: Settings, file: Path) -> None:
    """Everything about the runs so far, as JSON."""
    content = {
        "settings": asdict(settings),
        "versions": {"fp4graph": fp4graph.__version__, "torch": torch.__version__, "timm": timm.__version__},
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
        "runs": [asdict(run) for run in runs],
    }
    with _replacing(file) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


def _parsed(pairs: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise vision_data.ExampleError(f"--model-kwargs takes name=value; got {pair!r}")
        try:
            options[name] = json.loads(text)
        except json.JSONDecodeError:
            options[name] = text
    return options


def main(
    policies: Annotated[str, typer.Option(help="names or files, with commas between")] = "bf16,microscaling,tetrajet,tetrajet-qema",
    data: Annotated[str, typer.Option(help="digits, cifar10 or imagefolder:PATH")] = "digits",
    model: Annotated[str | None, typer.Option(help="any timm model's name")] = None,
    model_kwargs: Annotated[list[str] | None, typer.Option(help="name=value, for timm.create_model")] = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    weight_decay: float | None = None,
    warmup_epochs: int | None = None,
    img_size: int | None = None,
    patch_size: int | None = None,
    seed: int = 0,
    backend: Annotated[str, typer.Option(help="inductor, aot_eager or eager")] = "inductor",
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
    amp: Annotated[str, typer.Option(help="none, bf16 or fp16")] = "none",
    workers: int = 0,
    grad_checkpointing: bool = False,
    data_root: Annotated[Path, typer.Option(help="where cifar10 is kept")] = Path("data"),
    download: Annotated[bool, typer.Option(help="let torchvision fetch cifar10")] = False,
    limit_steps: Annotated[int | None, typer.Option(help="stop each epoch early, for a trial")] = None,
    output: Annotated[Path, typer.Option(help="folder for the log and the picture")] = Path("runs/pretrain_vit"),
) -> None:
    """Pre-train a timm model under several policies and compare them."""
    console = Console()
    try:
        recipe, split = vision_data.load(data, root=data_root, download=download)
        given = {"patch_size": patch_size if patch_size is not None else recipe.patch_size}
        settings = Settings(
            model=model or recipe.model,
            model_kwargs={
                **(recipe.model_kwargs if model is None else {}),
                **{name: value for name, value in given.items() if value is not None},
                **_parsed(model_kwargs or []),
            },
            epochs=epochs or recipe.epochs,
            batch_size=batch_size or recipe.batch_size,
            lr=lr or recipe.lr,
            weight_decay=recipe.weight_decay if weight_decay is None else weight_decay,
            warmup_epochs=recipe.warmup_epochs if warmup_epochs is None else warmup_epochs,
            img_size=img_size or recipe.img_size,
            seed=seed,
            backend=backend,
            device=device,
            amp=amp,
            workers=workers,
            grad_checkpointing=grad_checkpointing,
            limit_steps=limit_steps,
        )
        if amp not in ("none", "bf16", "fp16"):
            raise vision_data.ExampleError(f"--amp is none, bf16 or fp16; got {amp!r}")
        names = [name.strip() for name in policies.split(",") if name.strip()]
        for name in names:  # a misspelt fourth policy should not cost three trainings
            fp4graph.load_policy(name)
        output.mkdir(parents=True, exist_ok=True)
        runs: list[Run] = []
        columns = (
            TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[status]}"),
        )  # fmt: skip
        with Progress(*columns, console=console) as progress:
            for name in names:
                runs.append(train_policy(name, settings, split, recipe, progress))
                write_log(runs, settings, output / "log.json")
                plot(runs, output / "loss.png")
    except (vision_data.ExampleError, fp4graph.Error) as error:
        console.print(f"[red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    console.print(closing_table(runs))
    console.print(f"log: {output / 'log.json'}   picture: {output / 'loss.png'}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
