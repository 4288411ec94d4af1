"""Pre-train a Hugging Face LLaMA under an fp4graph policy: an ordinary loop. fp4graph's lines end in "# fp4graph".

    python examples/pretrain_llama.py                                     # bytes of Python's standard library
    python examples/pretrain_llama.py --data book.txt --policy nvfp4-best --amp bf16 --accumulate 4
    torchrun --standalone --nproc-per-node 2 examples/pretrain_llama.py   # DDP; FSDP2 with --fsdp

After a kill, --resume continues from the last checkpoint, as if the run had not been interrupted.
"""

import argparse
import math
import os
import sysconfig
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import fp4graph  # fp4graph
from fp4graph.optim import StableSPAM  # fp4graph
from fp4graph.training import checkpoint  # fp4graph

DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALL = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4}
VALIDATION_BATCHES = 16
NUMBERS = {"steps": 500, "batch-size": 16, "accumulate": 1, "context": 128, "validate-every": 50, "seed": 0, "lr": 1e-3}


def tokens_of(path):
    """Return the bytes of a file, or of Python's modules, for training and for validation (the last twentieth)."""
    files = [path] if path else sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    tokens = torch.frombuffer(bytearray(b"\n".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return tokens.split([len(tokens) - len(tokens) // 20, len(tokens) // 20])


def batch(tokens, size, context, *key):
    """Return ``[size, context]`` tokens from random places; equal keys give equal tokens."""
    generator = torch.Generator().manual_seed(hash(key) % 2**63)
    places = torch.randint(len(tokens) - context, (size, 1), generator=generator)
    return tokens[places + torch.arange(context)].long()


def train(args):
    rank = int(os.environ.get("RANK", 0))  # set by torchrun
    world = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    local = int(os.environ.get("LOCAL_RANK", 0))  # set by torchrun
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if world > 1:
        distributed.init_process_group()
    text, validation = tokens_of(args.data)
    steps, size = args.steps, args.batch_size // args.accumulate // world
    torch.manual_seed(args.seed)
    config = AutoConfig.from_pretrained(args.config) if args.config else LlamaConfig(vocab_size=256, **SMALL)
    model = AutoModelForCausalLM.from_config(config).to(device)
    if args.grad_checkpointing:
        model.gradient_checkpointing_enable()
    options = {"seed": args.seed, "total_forwards": steps * args.accumulate}
    model = fp4graph.apply(model, args.policy, backend=args.backend, **options)  # fp4graph
    wrapped, waiting = model, nullcontext
    if world > 1 and args.fsdp:
        for module in (*model.model.layers, model):
            fully_shard(module)
    elif world > 1:
        waiting = (wrapped := DistributedDataParallel(model)).no_sync
    if args.optimizer == "stablespam":
        optimizer = StableSPAM(model.parameters(), lr=args.lr, total_steps=steps)  # fp4graph
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = fp4graph.prepare_optimizer(model, optimizer)  # fp4graph
    scaler = torch.amp.GradScaler(device.type) if args.amp == "fp16" else fp4graph.grad_scaler(model)  # fp4graph
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(10 * (step + 1) / steps, 0.1 + 0.9 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    states, resumes = {"scaler": scaler, "scheduler": scheduler}, args.resume and args.checkpoint.exists()
    first = checkpoint.load(args.checkpoint, wrapped, optimizer, **states)["steps"] if resumes else 0  # fp4graph
    autocast = torch.autocast(device.type, DTYPES[args.amp], enabled=args.amp != "none")
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)

    for step in range(first + 1, steps + 1):
        total = torch.zeros(2, device=device)  # training and validation loss
        rows = batch(text, args.batch_size, args.context, args.seed, step).to(device)
        for number, part in enumerate(rows.view(args.accumulate, world, size, -1)[:, rank], 1):
            with nullcontext() if number == args.accumulate else waiting():
                with autocast:
                    loss = wrapped(input_ids=part, labels=part, use_cache=False).loss / args.accumulate
                scaler.scale(loss).backward()
            total[0] += loss.detach()
        if args.optimizer == "adamw":  # StableSPAM clips in its step
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        if step % args.validate_every == 0 or step == steps:
            wrapped.eval()
            with torch.no_grad(), autocast:
                for number in range(rank, VALIDATION_BATCHES * world, world):
                    part = batch(validation, size, args.context, number).to(device)
                    total[1] += wrapped(input_ids=part, labels=part, use_cache=False).loss / VALIDATION_BATCHES
            wrapped.train()
            if world > 1:
                distributed.all_reduce(total)
            if rank == 0:
                print(f"step {step}/{steps}: loss {total[0] / world:.3f}, val. {total[1] / world:.3f}", flush=True)
            checkpoint.save(args.checkpoint, wrapped, optimizer, **states, progress={"steps": step})  # fp4graph
    if world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="tetrajet", help="a shipped policy's name, or a policy file")
    parser.add_argument("--data", type=Path, help="a text file [the standard library's source]")
    parser.add_argument("--config", help="folder or hub name of a config.json of another size [1M parameters]")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "stablespam"])
    parser.add_argument("--amp", default="none", choices=DTYPES)
    for name, default in NUMBERS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/pretrain_llama.pt"))
    for name in ("fsdp", "grad-checkpointing", "resume"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    if args.checkpoint.exists() and not args.resume:
        parser.error(f"{args.checkpoint} already holds a run; continue with --resume, or give another --checkpoint")
    if args.batch_size % (args.accumulate * int(os.environ.get("WORLD_SIZE", 1))):
        parser.error("--batch-size must be a multiple of --accumulate times the number of processes")
    if len(tokens_of(args.data)[1]) <= args.context:
        parser.error("--data is too short: its last twentieth, for validation, must be longer than --context")
    train(args)
