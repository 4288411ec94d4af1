"""Time of one StableSPAM step against torch.optim.AdamW(foreach=True), the two alternating in one run.

    python benchmarks/optimizer_step.py --json step.json

The ratio of a repeat is that of two neighbouring steps' times, so that other load on the machine weighs on both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fp4graph.optim import StableSPAM

#: Twelve transformer blocks of five tensors each, mixed sizes.
SHAPES = [(768, 256), (256, 256), (1024, 256), (1024,), (256,)] * 12


def seconds(step: Callable[[], object], device: str) -> float:
    begin = time.perf_counter()
    step()
    if device != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin


def measure(width: int, dtype: torch.dtype, device: str, repeats: int, foreach: bool | None) -> dict[str, float]:
    torch.manual_seed(0)
    shapes = [tuple(max(1, size * width // 256) for size in shape) for shape in SHAPES]
    # Gradients differ from step to step, so that about as many are clipped as in training.
    draws = [[torch.randn(s, device=device, dtype=dtype) for s in shapes] for _ in range(4)]
    optimizers = []
    for build in (StableSPAM, torch.optim.AdamW):
        params = [torch.nn.Parameter(torch.randn(s, device=device, dtype=dtype)) for s in shapes]
        own = foreach if build is StableSPAM else True
        optimizers.append((params, build(params, lr=1e-3, weight_decay=0.01, foreach=own)))
    ratios, times = [], []
    for repeat in range(repeats + 3):
        pair = []
        for params, optimizer in optimizers:
            for p, grad in zip(params, draws[repeat % len(draws)], strict=True):
                p.grad = grad
            pair.append(seconds(optimizer.step, device))
        if repeat >= 3:  # the first ones make the state
            ratios.append(pair[0] / pair[1])
            times.append(pair)
    ours, adamw = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return {"ratio": statistics.median(ratios), "stable_spam_ms": ours, "adamw_ms": adamw}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for width in (32, 128, 256, 512):
        for dtype in (torch.float32, torch.bfloat16):
            for foreach in (None, False):
                row = measure(width, dtype, options.device, options.repeats, foreach)
                path = "single" if foreach is False else "foreach"
                rows.append({"width": width, "dtype": str(dtype).removeprefix("torch."), "path": path, **row})
                print("  ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in rows[-1].items()))
    if options.json:
        options.json.write_text(
            json.dumps({"tensors": len(SHAPES), "torch": torch.__version__, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
