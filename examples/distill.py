"""Distil a model into its quantized copy: ordinary PyTorch. fp4graph's lines end in "# fp4graph".

    python examples/distill.py                                     # a ViT on scikit-learn's handwritten digits
    python examples/distill.py --policy nvfp4 --temperature 4 --seeds 5

A teacher is trained in high precision. Two students start from its weights and train under the policy, on the same
batches. One learns the labels (fine-tuning). The other learns the teacher's outputs with the loss
T²·KL(softmax(t/T) ‖ softmax(s/T)) at temperature T (Hinton et al. 2015, "Distilling the Knowledge in a Neural Network",
sec. 2). Both are compared with the teacher's weights, quantized without training.
"""

import argparse
import copy
import math
import statistics

import timm
import torch
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import fp4graph  # fp4graph

SMALL = {"in_chans": 1, "num_classes": 10, "img_size": 8, "patch_size": 2, "embed_dim": 64, "depth": 2, "num_heads": 2}
HELD_OUT = 597  # of 1,797 images


def digits():
    """Return images ``[n, 1, 8, 8]`` and labels ``[n]``, for training and for validation."""
    scans = load_digits()
    images = (torch.from_numpy(scans.images).float().unsqueeze(1) / 16 - 0.305) / 0.376
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    labels = torch.from_numpy(scans.target)
    return (images[train], labels[train]), (images[held_out], labels[held_out])


def divergence(student, teacher, temperature=1.0):
    """Return T²·KL(teacher ‖ student) of logits ``[n, classes]``, in nats, averaged over n."""
    student, teacher = (log_softmax(logits / temperature, -1) for logits in (student, teacher))
    return temperature**2 * kl_div(student, teacher, reduction="batchmean", log_target=True)


def learn(model, optimizer, data, loss, steps, seed, batch_size):
    """Take ``steps`` steps down ``loss(logits, images, labels)``; equal seeds give equal batches."""
    images, labels = data
    generator = torch.Generator().manual_seed(seed)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: (1 + math.cos(math.pi * step / max(steps, 1))) / 2
    )
    model.train()
    for _ in range(steps):
        rows = torch.randint(len(images), (batch_size,), generator=generator)
        loss(model(images[rows]), images[rows], labels[rows]).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def from_labels(logits, images, labels):
    return cross_entropy(logits, labels)


@torch.no_grad()
def quality(model, data, teacher):
    """Return the cross-entropy, the accuracy in per cent and the divergence from the teacher on held-out data."""
    images, labels = data
    logits, target = model.eval()(images), teacher(images)
    accuracy = 100 * (logits.argmax(-1) == labels).float().mean().item()
    return cross_entropy(logits, labels).item(), accuracy, divergence(logits, target).item()


def compare(args, seed):
    """Return the quality of the teacher, of its quantized weights and of both students."""
    train, held_out = digits()
    torch.manual_seed(seed)
    teacher = timm.create_model("vit_tiny_patch16_224", **SMALL)
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=1e-3, weight_decay=0.05)
    learn(teacher, optimizer, train, from_labels, args.teacher_steps, seed, args.batch_size)
    teacher.eval().requires_grad_(False)
    results = {"teacher": quality(teacher, held_out, teacher)}

    def from_teacher(logits, images, _):
        with torch.no_grad():
            target = teacher(images)
        return divergence(logits, target, args.temperature)

    students = {"quantized alone": (from_labels, 0), "fine-tuned": (from_labels, args.steps)}
    for name, (loss, steps) in {**students, "distilled": (from_teacher, args.steps)}.items():
        student = copy.deepcopy(teacher).requires_grad_(True)
        options = {"backend": args.backend, "seed": seed, "total_forwards": max(steps, 1)}
        student = fp4graph.apply(student, args.policy, **options)  # fp4graph
        optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.05)
        optimizer = fp4graph.prepare_optimizer(student, optimizer)  # fp4graph
        learn(student, optimizer, train, loss, steps, seed + 1, args.batch_size)
        results[name] = quality(student, held_out, teacher)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mxfp4", help="a shipped policy's name, or a policy file")
    parser.add_argument("--backend", default="inductor", choices=["inductor", "aot_eager", "eager"])
    numbers = {"temperature": 2.0, "teacher-steps": 2000, "steps": 300, "batch-size": 64, "lr": 3e-4, "seeds": 3}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    args = parser.parse_args()
    runs = [compare(args, seed) for seed in range(args.seeds)]
    print(f"{args.policy}, median of {args.seeds} seeds: validation loss, accuracy in %, divergence from the teacher")
    for name in runs[0]:
        loss, accuracy, divergent = (statistics.median(run[name][i] for run in runs) for i in range(3))
        print(f"{name:16}{loss:8.4f}{accuracy:8.2f}{divergent:10.5f}")
