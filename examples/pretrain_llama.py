"""Pre-train a LLaMA of Hugging Face's under an fp4graph policy.

    python examples/pretrain_llama.py                                      # 9M on the standard library's source
    python examples/pretrain_llama.py --preset 60M --data wikitext-103-raw --policy mxfp4-best --optimizer adamw
    torchrun --nproc-per-node 8 examples/pretrain_llama.py --preset 1B --amp bf16 --fsdp

A run can be killed at any moment: started again with --resume it goes on from its last checkpoint, to the last bit as
if nothing had happened. Tokens per second are a median over steps: forward, backward and optimizer.
"""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import fp4graph
from fp4graph.experiments.data import text as text_data
from fp4graph.optim import StableSPAM
from fp4graph.training import checkpoint

#: (width, feed-forward width, layers, heads, vocabulary). All but the first are those of GaLore (Zhao et al. 2024),
#: which StableSPAM took over: 8,995,968, 58,073,600, 367,969,280 and 1,339,082,752 parameters. The design-space paper
#: takes its 350M and 1B from Tseng et al. 2025 instead, "Training LLMs with MXFP4".
PRESETS = {
    "tiny": (64, 176, 2, 2, text_data.BYTES),  # 133,440 parameters, for a trial
    "9M": (128, 352, 4, 4, 32_000),
    "60M": (512, 1376, 8, 8, 32_000),
    "350M": (1024, 2736, 24, 16, 32_000),
    "1B": (2048, 5461, 24, 32, 32_000),
}
Preset = StrEnum("Preset", {name: name for name in PRESETS})  # type: ignore[misc]
#: Training steps left out of the timing: they compile, and fill caches.
WARM_UP_STEPS = 5
#: What may change when a run is resumed: it changes nothing that is computed, or rounding only.
FREE = {"backend", "device", "fsdp", "checkpoint_every", "grad_checkpointing"}


class Optimizer(StrEnum):
    adamw = "adamw"
    stablespam = "stablespam"


@dataclass(frozen=True)
class Settings:
    """What a run is: two runs of the same settings on the same machine are the same."""

    preset: str
    data: str
    vocabulary: int
    policy: str
    optimizer: str
    lr: float
    weight_decay: float
    clip: float
    warmup_steps: int
    steps: int
    batch_size: int
    accumulate: int
    context: int
    validate_every: int
    validation_batches: int
    checkpoint_every: int
    seed: int
    backend: str
    device: str
    amp: str
    grad_checkpointing: bool
    fsdp: bool


@dataclass
class Run:
    """What a run came to so far: the last part of a checkpoint, and of the log.

    Attributes:
        train_loss: one value per step; mean over the step's sequences.
        validation_loss: [step, loss], cross-entropy per token.
        step_seconds: of the steps since the last start.
    """

    train_loss: list[float] = field(default_factory=list)
    validation_loss: list[list[float]] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)

    def tokens_per_second(self, settings: Settings) -> float | None:
        """Median, the first steps left out; None before."""
        timed = self.step_seconds[WARM_UP_STEPS:]
        return settings.batch_size * settings.context / statistics.median(timed) if timed else None


def build(settings: Settings) -> LlamaForCausalLM:
    """The model, its weights a function of the seed alone."""
    width, feed_forward, layers, heads, _ = PRESETS[settings.preset]
    torch.manual_seed(settings.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=settings.vocabulary,
            hidden_size=width,
            intermediate_size=feed_forward,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            max_position_embeddings=max(1024, settings.context),
            bos_token_id=text_data.SEPARATOR,
            eos_token_id=text_data.SEPARATOR,
            use_cache=False,
        )
    )
    if settings.grad_checkpointing:
        model.gradient_checkpointing_enable()
    return model.to(settings.device)


def spread(model: LlamaForCausalLM, settings: Settings, here: Processes) -> nn.Module:
    """``model`` for several processes: under DDP, or its layers sharded."""
    if here.world == 1:
        return model
    if not settings.fsdp:
        return DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def make_optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Weights decay; norms' gains do not."""
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if settings.optimizer == Optimizer.stablespam:
        return StableSPAM(groups, lr=settings.lr, total_steps=settings.steps)
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95))


def schedule(settings: Settings) -> Any:
    """Factor of the learning rate at a step: linear to 1, then half a cosine down to a tenth."""

    def factor(step: int) -> float:
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        done = (step - settings.warmup_steps) / max(settings.steps - settings.warmup_steps, 1)
        return 0.1 + 0.9 * (1 + math.cos(math.pi * min(done, 1.0))) / 2

    return factor


def train(settings: Settings, tokens: text_data.Tokens, output: Path, here: Processes, console: Console) -> Run:
    """Train to the end, from the checkpoint in ``output`` if there is one."""
    file = output / "checkpoint.pt"
    device = torch.device(settings.device)
    per_rank = settings.batch_size // settings.accumulate // here.world
    model = build(settings)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    example = torch.zeros(per_rank, settings.context, dtype=torch.int64, device=device)
    explanation = fp4graph.explain(model, settings.policy, kwargs={"input_ids": example, "labels": example})

    # The lines that make a model train under a policy. The rest of this function is an ordinary loop.
    forwards = settings.steps * settings.accumulate  # for policies with phases
    options = {"backend": settings.backend, "seed": settings.seed, "total_forwards": forwards}
    model = fp4graph.apply(model, settings.policy, **options)
    wrapped = spread(model, settings, here)
    optimizer = fp4graph.prepare_optimizer(model, make_optimizer(model, settings))
    scaler = torch.amp.GradScaler(device.type) if settings.amp == Amp.fp16 else fp4graph.grad_scaler(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(settings))

    run = Run()
    identity = {**_kept(settings), "tokens": tokens.checksum}
    if file.exists():
        progress = checkpoint.load(file, wrapped, optimizer, scaler=scaler, scheduler=scheduler)
        run.train_loss, run.validation_loss = progress["train_loss"], progress["validation_loss"]
        console.print(f"resumed after step {len(run.train_loss)} from {file}", highlight=False)
    quantized = sum(site.quantized for site in explanation.sites)
    console.print(
        f"LLaMA {settings.preset}, {parameters:,} parameters, {len(tokens.train):,} tokens to train on; "
        f"{explanation.policy.name}: {quantized} of {len(explanation.sites)} matrix products quantized, "
        f"Ω {explanation.policy.complexity:g}",
        highlight=False,
        soft_wrap=True,
    )
    context = {
        "settings": asdict(settings),
        "parameters": parameters,
        "quantized": quantized,
        "sites": len(explanation.sites),
        "processes": here.world,
        "versions": {
            "fp4graph": fp4graph.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": {"processor": platform.machine(), "threads": torch.get_num_threads()},
    }

    def keep() -> None:
        progress = {"identity": identity, "train_loss": run.train_loss, "validation_loss": run.validation_loss}
        checkpoint.save(file, wrapped, optimizer, scaler=scaler, scheduler=scheduler, progress=progress)
        if here.first:
            results = {**context, "tokens_per_second": run.tokens_per_second(settings), **asdict(run)}
            with checkpoint.replacing(output / "log.json") as log:
                log.write(json.dumps(results, indent=1).encode() + b"\n")

    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *bar, TimeRemainingColumn(), TextColumn("{task.fields[status]}"), console=console,
        disable=not console.is_terminal or not here.first,
    ) as shown:  # fmt: skip
        task = shown.add_task(settings.policy, total=settings.steps, completed=len(run.train_loss), status="compiling")
        for step in range(len(run.train_loss), settings.steps):
            rows = text_data.batch(tokens.train, settings.batch_size, settings.context, settings.seed, step)
            parts = rows.to(device).view(settings.accumulate, here.world, per_rank, -1)[:, here.rank]
            synchronize(device)
            begin = time.perf_counter()
            loss = train_step(wrapped, parts, optimizer, scaler, settings)
            run.train_loss.append(here.mean(loss))
            synchronize(device)
            run.step_seconds.append(time.perf_counter() - begin)
            if not math.isfinite(run.train_loss[-1]):
                raise ExampleError(
                    f"the loss of step {step + 1} is {run.train_loss[-1]}; the last checkpoint is from before. Try "
                    "a lower --lr, more --warmup-steps, or another policy"
                )
            scheduler.step()
            done = step + 1
            if done % settings.validate_every == 0 or done == settings.steps:
                value = evaluate(wrapped, tokens, per_rank, settings, here)
                run.validation_loss.append([done, value])
                _report(run, settings, console, shown)
            if done % settings.checkpoint_every == 0 or done == settings.steps:
                keep()
            shown.update(task, advance=1, status=_status(run, settings))
    return run


def train_step(
    model: nn.Module,
    parts: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    settings: Settings,
) -> torch.Tensor:
    """One step of the optimizer on ``parts``, ``[micro-batches, sequences, tokens]``; the mean loss."""
    total = torch.zeros((), device=parts.device)
    for number, rows in enumerate(parts):
        last = number == len(parts) - 1
        waiting = model.no_sync() if isinstance(model, DistributedDataParallel) and not last else nullcontext()
        with waiting:
            with autocast(settings.amp, settings.device):
                loss = model(input_ids=rows, labels=rows).loss / len(parts)
            scaler.scale(loss).backward()
        total += loss.detach()
    if settings.clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return total


@torch.no_grad()
def evaluate(model: nn.Module, tokens: text_data.Tokens, size: int, settings: Settings, here: Processes) -> float:
    """Mean cross-entropy per token over sequences of the validation text."""
    model.eval()
    losses = []
    limit = settings.validation_batches * here.world
    for rows in text_data.validation_batches(tokens.validation, size, settings.context, limit, here.rank, here.world):
        rows = rows.to(settings.device)
        with autocast(settings.amp, settings.device):
            losses.append(model(input_ids=rows, labels=rows).loss.float())
    model.train()
    return here.mean(torch.stack(losses).mean())


def _status(run: Run, settings: Settings) -> str:
    speed = run.tokens_per_second(settings)
    validation = f", val. {run.validation_loss[-1][1]:.3f}" if run.validation_loss else ""
    return f"loss {run.train_loss[-1]:.3f}{validation}" + (f", {speed:,.0f} tokens/s" if speed else "")


def _report(run: Run, settings: Settings, console: Console, shown: Progress) -> None:
    if not console.is_terminal:  # no bar there: a line for each validation instead
        recent = statistics.fmean(run.train_loss[-settings.validate_every :])
        step, value = run.validation_loss[-1]
        speed = run.tokens_per_second(settings)
        shown.console.print(
            f"step {step}/{settings.steps}: loss {recent:.3f}, val. {value:.3f}"
            + (f", {speed:,.0f} tokens/s" if speed else ""),
            highlight=False,
        )


def _kept(settings: Settings) -> dict[str, Any]:
    """What a resumed run must agree on."""
    return {name: value for name, value in asdict(settings).items() if name not in FREE}


def check_resumable(file: Path, settings: Settings, resume: bool) -> None:
    """Refuse to write over another run, or to go on with one that was not like this."""
    if not file.exists():
        return
    progress = checkpoint.read_summary(file).progress
    if not resume:
        raise ExampleError(
            f"{file} holds a run, of {len(progress['train_loss'])} steps: pass --resume to go on with it, or another "
            "--output"
        )
    changed = [
        f"--{name.replace('_', '-')} was {progress['identity'].get(name)}, is {value}"
        for name, value in _kept(settings).items()
        if progress["identity"].get(name) != value
    ]
    if changed:
        raise ExampleError(f"{file} is of another run: {'; '.join(changed)}")


def prepare_tokens(settings: Settings, output: Path, here: Processes, resume: bool) -> text_data.Tokens:
    """Read the text and cut it into tokens; the first process trains the tokenizer for all."""
    texts = text_data.text_files(Path(settings.data).expanduser()) if settings.data else text_data.standard_library()
    file = output / "tokenizer.json"
    if here.first and settings.vocabulary != text_data.BYTES and not (resume and file.exists()):
        text_data.train_tokenizer(texts.train, settings.vocabulary, file)
    here.wait()
    tokens = text_data.tokenize(texts, settings.vocabulary, file)
    rows = settings.batch_size // settings.accumulate
    if len(tokens.train) < settings.context or len(tokens.validation) < rows * settings.context:
        raise ExampleError(
            f"{len(tokens.train)} tokens to train on and {len(tokens.validation)} to validate on are too few for "
            f"sequences of {settings.context}, {rows} at a time"
        )
    return tokens


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help="Pre-train a LLaMA under a policy.")
def main(
    preset: Annotated[Preset, typer.Option(help="Size.")] = Preset["9M"],
    data: Annotated[str, typer.Option(help="A text file or a folder of them. [the standard library's source]")] = "",
    vocabulary: Annotated[int | None, typer.Option(min=256, help="256: bytes. [the preset's]")] = None,
    policy: Annotated[str, typer.Option(help="Name or file.")] = "tetrajet",
    optimizer: Annotated[Optimizer, typer.Option()] = Optimizer.adamw,
    lr: Annotated[float, typer.Option(min=0, help="Its highest value.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option(min=0)] = 0.1,
    clip: Annotated[
        float | None, typer.Option(min=0, help="Norm of the gradient. [1; 0, none, for stablespam]")
    ] = None,
    warmup_steps: Annotated[int | None, typer.Option(min=0, help="[a tenth]")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step, of all processes.")] = 32,
    accumulate: Annotated[int, typer.Option(min=1, help="Backward passes per step.")] = 1,
    context: Annotated[int, typer.Option(min=8, help="Tokens per sequence.")] = 256,
    validate_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 100,
    validation_batches: Annotated[int, typer.Option(min=1, help="Per process, as large as in training.")] = 16,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps.")] = 100,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint, if there is one.")] = False,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    backend: Annotated[Backend, typer.Option(help="Of torch.compile.")] = Backend.inductor,
    device: Annotated[str, typer.Option(help="cpu, cuda, ...; auto takes CUDA where there is one.")] = "auto",
    amp: Annotated[Amp, typer.Option(help="Autocast; none trains in float32.")] = Amp.none,
    grad_checkpointing: Annotated[bool, typer.Option("--grad-checkpointing", help="Recompute activations.")] = False,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard the model instead of copying it (torchrun).")] = False,
    output: Annotated[Path, typer.Option(help="Folder of checkpoint, tokenizer and log.")] = Path(
        "runs/pretrain_llama"
    ),
) -> None:
    console = first_console()
    try:
        with processes(device_named(device)) as (here, own_device):
            settings = Settings(
                preset=preset.value,
                data=data,
                vocabulary=PRESETS[preset.value][-1] if vocabulary is None else vocabulary,
                policy=policy,
                optimizer=optimizer.value,
                lr=lr,
                weight_decay=weight_decay,
                clip=clip if clip is not None else float(optimizer != Optimizer.stablespam),
                warmup_steps=steps // 10 if warmup_steps is None else warmup_steps,
                steps=steps,
                batch_size=batch_size,
                accumulate=accumulate,
                context=context,
                validate_every=validate_every,
                validation_batches=validation_batches,
                checkpoint_every=checkpoint_every,
                seed=seed,
                backend=backend.value,
                device=own_device,
                amp=amp.value,
                grad_checkpointing=grad_checkpointing,
                fsdp=fsdp,
            )
            if batch_size % (accumulate * here.world):
                raise ExampleError(
                    f"--batch-size {batch_size} cannot be shared by {here.world} processes in {accumulate} parts"
                )
            fp4graph.load_policy(policy)  # before anything takes time
            output.mkdir(parents=True, exist_ok=True)
            check_resumable(output / "checkpoint.pt", settings, resume)
            tokens = prepare_tokens(settings, output, here, resume)
            run = train(settings, tokens, output, here, console)
    except (ExampleError, fp4graph.Error) as error:
        print_error(error)
        raise typer.Exit(1) from None
    step, value = run.validation_loss[-1]
    speed = run.tokens_per_second(settings)
    console.print(
        f"step {step}: loss {run.train_loss[-1]:.3f}, validation {value:.3f} (perplexity {math.exp(value):.1f})"
        + (f", {speed:,.0f} tokens/s" if speed else ""),
        f"checkpoint: {output / 'checkpoint.pt'}, log: {output / 'log.json'}",
        sep="\n",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    app()
