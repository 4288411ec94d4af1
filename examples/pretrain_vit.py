"""Pre-train a timm model under an fp4graph policy: an ordinary loop. fp4graph's lines end in "# fp4graph".

    python examples/pretrain_vit.py                                            # scikit-learn's handwritten digits
    python examples/pretrain_vit.py --data /data/imagenet --model deit_tiny_patch16_224 --amp bf16 --workers 8
    torchrun --standalone --nproc-per-node 2 examples/pretrain_vit.py          # DistributedDataParallel

After a kill, --resume continues after the last complete epoch, as if the run had not been interrupted.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import timm
import torch
from sklearn.datasets import load_digits
from timm.data import ImageDataset, create_transform
from timm.optim import create_optimizer_v2
from timm.utils import random_seed
from torch import distributed
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

import fp4graph  # fp4graph
from fp4graph.training import checkpoint  # fp4graph

DTYPES = {"none": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def datasets(folder, model):
    """Return training data, validation data and model options, for a folder's images or for scans of 8x8 pixels."""
    if folder is not None:  # folder/train/CLASS/*.jpg and folder/val/CLASS/*.jpg
        size = timm.get_pretrained_cfg(model).input_size[-1]
        augmented = create_transform(size, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
        train = ImageDataset(str(folder / "train"), transform=augmented)
        classes = train.reader.class_to_idx
        validation = ImageDataset(str(folder / "val"), class_map=classes, transform=create_transform(size))
        return train, validation, {"num_classes": len(classes)}
    scans = load_digits()
    images = torch.from_numpy(scans.images).float().unsqueeze(1) / 16
    data = TensorDataset((images - 0.305) / 0.376, torch.from_numpy(scans.target))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    parts = (Subset(data, rows) for rows in (order[360:], order[:360]))
    small = {"img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 2, "num_heads": 2}
    return *parts, {"in_chans": 1, "num_classes": 10, **small}


def train(args):
    rank = int(os.environ.get("RANK", 0))  # set by torchrun
    world = int(os.environ.get("WORLD_SIZE", 1))  # set by torchrun
    local = int(os.environ.get("LOCAL_RANK", 0))  # set by torchrun
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if world > 1:
        distributed.init_process_group()
    train_set, validation_set, options = datasets(args.data, args.model)
    sampler = DistributedSampler(train_set, world, rank, seed=args.seed, drop_last=True)
    loading = {"batch_size": args.batch_size // world, "num_workers": args.workers}
    batches = DataLoader(train_set, sampler=sampler, drop_last=True, **loading)
    validation = DataLoader(validation_set, sampler=range(rank, len(validation_set), world), **loading)
    steps = args.epochs * len(batches)
    if not steps:
        sys.exit("pretrain_vit.py: there are fewer training images than --batch-size, or no --epochs")

    torch.manual_seed(args.seed)
    model = timm.create_model(args.model, **options).to(device)
    if args.grad_checkpointing:
        model.set_grad_checkpointing()
    model = fp4graph.apply(model, args.policy, backend=args.backend, seed=args.seed, total_forwards=steps)  # fp4graph
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = create_optimizer_v2(model, opt="adamw", lr=args.lr, weight_decay=0.05)
    optimizer = fp4graph.prepare_optimizer(model, optimizer)  # fp4graph
    scaler = torch.amp.GradScaler(device.type) if args.amp == "fp16" else fp4graph.grad_scaler(model)  # fp4graph
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(20 * (step + 1) / steps, 0.01 + 0.99 * (1 + math.cos(math.pi * step / steps)) / 2)
    )
    states, resumes = {"scaler": scaler, "scheduler": scheduler}, args.resume and args.checkpoint.exists()
    first = checkpoint.load(args.checkpoint, wrapped, optimizer, **states)["epochs"] if resumes else 0  # fp4graph
    autocast = torch.autocast(device.type, DTYPES[args.amp], enabled=args.amp != "none")

    for epoch in range(first, args.epochs):
        random_seed(args.seed + epoch, rank)
        sampler.set_epoch(epoch)
        wrapped.train()
        total = torch.zeros(4, dtype=torch.float64, device=device)  # training loss, validation loss, hits, images
        for images, labels in batches:
            with autocast:
                loss = cross_entropy(wrapped(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            total[0] += loss.detach() / len(batches) / world
        wrapped.eval()
        with torch.no_grad(), autocast:
            for images, labels in validation:
                logits, labels = model(images.to(device)).float(), labels.to(device)
                total[1] += cross_entropy(logits, labels, reduction="sum")
                total[2] += (logits.argmax(1) == labels).sum()
                total[3] += len(labels)
        if world > 1:
            distributed.all_reduce(total)
        if rank == 0:
            loss, held_out, hits = total[0], *(total[1:3] / total[3])
            print(f"epoch {epoch + 1}/{args.epochs}: loss {loss:.3f}, val. {held_out:.3f}, top-1 {100 * hits:.1f} %")
        checkpoint.save(args.checkpoint, wrapped, optimizer, **states, progress={"epochs": epoch + 1})  # fp4graph
    if world > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="tetrajet", help="a shipped policy's name, or a policy file")
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="any timm model that fits the images")
    parser.add_argument("--data", type=Path, help="folder with train/CLASS/*.jpg and val/CLASS/*.jpg [digits]")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    parser.add_argument("--amp", default="none", choices=DTYPES)
    for name, default in {"epochs": 20, "batch-size": 64, "workers": 0, "seed": 0, "lr": 2e-3}.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--checkpoint", type=Path, default=Path("runs/pretrain_vit.pt"))
    for name in ("grad-checkpointing", "resume"):
        parser.add_argument(f"--{name}", action="store_true")
    args = parser.parse_args()
    if args.checkpoint.exists() and not args.resume:
        parser.error(f"{args.checkpoint} already holds a run; continue with --resume, or give another --checkpoint")
    if args.batch_size % int(os.environ.get("WORLD_SIZE", 1)):
        parser.error("--batch-size must be a multiple of the number of processes")
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    train(args)
