"""Pre-train a Hugging Face LLaMA under an fp4graph policy: an ordinary loop. The lines that fp4graph needs end in
"# fp4graph".

    python examples/pretrain_llama.py                                        # bytes of Python's own standard library
    python examples/pretrain_llama.py --data book.txt --policy nvfp4-best --amp bf16 --accumulate 4
    torchrun --standalone --nproc-per-node 2 examples/pretrain_llama.py      # DistributedDataParallel; FSDP2 with --fsdp

A run that was killed goes on from its last checkpoint with --resume, as if nothing had happened.
"""

import argparse
import math
import os
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

import fp4graph  # fp4graph
from fp4graph.optim import StableSPAM  # fp4graph
from fp4graph.training import checkpoint  # fp4graph

VALIDATION_BATCHES = 16


def tokens_of(path):
    """Return the bytes of a file, or of Python's modules, for training and for validation (the last twentieth)."""
    files = [path] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"\n".join(file.read_bytes() for file in files)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return tokens.split([len(tokens) - len(tokens) // 20, len(tokens) // 20])


def batch(tokens, size, context, *key):
    """Return ``[size, context]`` tokens from random places, which are a function of ``key``."""
    generator = torch.Generator().manual_seed(hash(key) % 2**63)
    places = torch.randint(len(tokens) - context, (size, 1), generator=generator)
    return tokens[places + torch.arange(context)].long()


def train(args, rank, world, device):
    text, validation = tokens_of(args.data)
    size = args.batch_size // args.accumulate // world
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=args.context, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device)
    if args.grad_checkpointing:
        model.gradient_checkpointing_enable()
    forwards = args.steps * args.accumulate
    model = fp4graph.apply(
        model, args.policy, backend=args.backend, seed=args.seed, total_forwards=forwards
    )  # fp4graph
    wrapped, waiting = model, nullcontext
    if world > 1 and args.fsdp:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif world > 1:
        wrapped = DistributedDataParallel(model)
        waiting = wrapped.no_sync
    if args.optimizer == "stablespam":
        optimizer = StableSPAM(model.parameters(), lr=args.lr, total_steps=args.steps)  # fp4graph
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = fp4graph.prepare_optimizer(model, optimizer)  # fp4graph
    scaler = torch.amp.GradScaler(device.type) if args.amp == "fp16" else fp4graph.grad_scaler(model)  # fp4graph
    warmup, steps = max(args.steps // 10, 1), args.steps
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    first = 0
    if args.resume and args.checkpoint.exists():
        first = checkpoint.load(args.checkpoint, wrapped, optimizer, scaler=scaler, scheduler=scheduler)["steps"]

    def loss_of(tokens):
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(args.amp)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            return wrapped(input_ids=tokens, labels=tokens).loss

    for step in range(first + 1, steps + 1):
        total = torch.zeros(2, device=device)  # training and validation loss
        rows = batch(text, args.batch_size, args.context, args.seed, step).to(device)
        parts = rows.view(args.accumulate, world, size, -1)[:, rank]
        for number, part in enumerate(parts, 1):
            with nullcontext() if number == len(parts) else waiting():
                loss = loss_of(part) / len(parts)
                scaler.scale(loss).backward()
            total[0] += loss.detach()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        if step % args.validate_every == 0 or step == steps:
            wrapped.eval()
            with torch.no_grad():
                for number in range(rank, VALIDATION_BATCHES * world, world):
                    total[1] += loss_of(batch(validation, size, args.context, number).to(device)) / VALIDATION_BATCHES
            wrapped.train()
            if world > 1:
                distributed.all_reduce(total)
            if rank == 0:
                args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
                print(f"step {step}/{steps}: loss {total[0] / world:.3f}, val. {total[1] / world:.3f}", flush=True)
            states = {"scaler": scaler, "scheduler": scheduler, "progress": {"steps": step}}
            checkpoint.save(args.checkpoint, wrapped, optimizer, **states)  # fp4graph


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="tetrajet", help="a shipped policy's name, or a policy file")
    parser.add_argument("--data", type=Path, help="a text file [the standard library's source]")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "stablespam"])
    parser.add_argument("--amp", default="none", choices=["none", "bf16", "fp16"])
    numbers = {"steps": 500, "batch-size": 16, "accumulate": 1, "context": 128, "validate-every": 50, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/pretrain_llama.pt"))
    for name in ("fsdp", "grad-checkpointing", "resume"):
        parser.add_argument(f"--{name}", action="store_true")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else "cpu"
    if "RANK" in os.environ:  # torchrun started this
        distributed.init_process_group()
    world = distributed.get_world_size() if distributed.is_initialized() else 1
    train(parser.parse_args(), int(os.environ.get("RANK", 0)), world, torch.device(device))
    if distributed.is_initialized():
        distributed.destroy_process_group()
