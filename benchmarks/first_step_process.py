"""The process that benchmarks/first_step.py times: MODEL POLICY BATCH DTYPE DEVICE BACKEND.

Its last line of output is JSON: the seconds, the loss, and the hits in the caches of compiled graphs.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch._functorch.aot_autograd
import torch._inductor.compile_fx
from torch._dynamo.utils import counters

import fp4graph
from benchmarks.models import MODELS, Training
from benchmarks.options import DTYPES
from benchmarks.timing import synchronize
from fp4graph.technique.registry import default_registry


def main(model: str, policy: str, batch: str, dtype: str, device: str, backend: str) -> None:
    default_registry()  # imports the plugins
    _ = fp4graph.apply, fp4graph.prepare_optimizer  # imports the modules of both
    torch_device = torch.device(device)
    training = Training(MODELS[model], policy, int(batch), DTYPES[dtype], torch_device, backend)
    synchronize(torch_device)
    begin = time.perf_counter()
    training.compile()
    loss = training.step()
    synchronize(torch_device)
    seconds = time.perf_counter() - begin
    counts = {**counters["inductor"], **counters["aot_autograd"]}
    caches = {name: count for name, count in counts.items() if "cache" in name}
    hits = sum(count for name, count in caches.items() if name.endswith("cache_hit"))
    print(json.dumps({"seconds": seconds, "loss": loss.item(), "hits": hits, "caches": caches}))


if __name__ == "__main__":
    main(*sys.argv[1:])
