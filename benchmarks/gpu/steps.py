"""The timings of ``make gpu-validate``: training steps, quantized beside unquantized, with every switch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._inductor.utils import fresh_cache
from torch.profiler import ProfilerActivity, profile

from benchmarks.models import DTYPES, MODELS, UNQUANTIZED, Training, llama_blocks
from benchmarks.timing import Patience, compare, synchronize
from fp4graph.kernels import gpu, operators, switches

#: LLaMA-350M is that of GaLore (Zhao et al. 2024); eight of its 24 equal blocks take a third of the compile time.
STEPS = {
    **MODELS,
    "llama-350m": llama_blocks(1024, 2736, 16, tokens=256, size=32, depth=8),
    "trial-stack": llama_blocks(64, 192, 2, tokens=32, size=4, depth=2),
}
SIZES = {"deit-small": 64, "deit-base": 64}
#: The block of ``make gpu-plan`` of which a model consists.
PREDICTED = {"deit-base": "vit-b", "deit-tiny": "deit-tiny", "llama-350m": "llama-350m"}


POLICIES = ("tetrajet", "tetrajet-qema", "microscaling", "nvfp4", "fp4-all-the-way")


@dataclass(frozen=True)
class Switch:
    """One way to run a step, and what is measured with it."""

    why: str  # on the page
    context: Callable[[], AbstractContextManager[Any]] = nullcontext  # around compiling of the quantized program
    mode: str | None = None  # torch.compile's, for both programs
    policies: tuple[str, ...] = ("tetrajet", "microscaling")
    dtypes: tuple[str, ...] = ("bfloat16", "float32")


#: The default comes first; every other switch changes one thing.
SWITCHES = {
    "default": Switch("kernels; bf16 products in an fp32 model; Inductor's defaults", policies=POLICIES),
    "FP4GRAPH_KERNELS=0": Switch("tensor code that Inductor fuses, and nothing packed", operators.tensor_code),
    "FP4GRAPH_KERNELS=quantizers,products": Switch(
        "an fp32 model's GEMMs stay in fp32", gpu.products_in_fp32, dtypes=("float32",)
    ),
    "FP4GRAPH_KERNELS=quantizers,bf16-products": Switch(  # a library computes an fp32 model's products in any case
        "a tensor scale multiplies the result of cuBLAS",
        partial(switches.using, products=0),
        policies=("fp4-all-the-way",),
        dtypes=("bfloat16",),
    ),
    "mode=reduce-overhead": Switch("CUDA graphs", mode="reduce-overhead"),
    "mode=max-autotune-no-cudagraphs": Switch("GEMMs that Inductor chooses", mode="max-autotune-no-cudagraphs"),
}


def step(
    model: str,
    policy: str,
    dtype: str,
    switch: str,
    device: torch.device,
    backend: str,
    seconds: float,
    ready: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Return the time of a step relative to the unquantized step; of both programs peak memory, compile time and the
    time in which the device was busy, which is shorter than the step where the host is slower; the longest kernels.

    ``ready`` is called before the time is measured, and returns when nothing else uses the device.
    """
    torch._dynamo.reset()
    mode = SWITCHES[switch].mode if backend == "inductor" else None
    names = {"baseline_": UNQUANTIZED, "": policy}
    trainings, figures = dict[str, Training](), dict[str, Any]()
    with ExitStack() as stack:
        # The compilers' caches stay until both programs have run, because kernels may be loaded late.
        caches = stack.enter_context(TemporaryDirectory(prefix="gpu_steps-", ignore_cleanup_errors=True))
        for prefix, name in names.items():
            before = _allocated(device)
            size = SIZES.get(model, STEPS[model].size)
            training = Training(STEPS[model], name, size, DTYPES[dtype], device, backend, mode)
            if name != UNQUANTIZED:
                stack.enter_context(SWITCHES[switch].context())
            figures[f"{prefix}compile_seconds"] = _compiled(training, device, backend, caches)
            figures[f"{prefix}peak_bytes"] = _peak(training, before, device, mode)
            trainings[prefix] = training
        ready()
        patience = Patience(seconds=seconds, least=5)
        comparison = compare(trainings["baseline_"].step, trainings[""].step, device, patience, warm_up=2)
        for prefix, training in trainings.items():
            kernels = _kernels(training, device)
            figures |= {f"{prefix}busy_seconds": sum(kernels.values()) or None, f"{prefix}kernels": _longest(kernels)}
    return {**comparison.figures, **figures}


def _compiled(training: Training, device: torch.device, backend: str, caches: str) -> float:
    """Return the seconds of the first step, which compiles with an empty cache: a new folder in ``caches``."""
    with fresh_cache(dir=caches, delete=False) if backend == "inductor" else nullcontext():
        began = time.perf_counter()
        training.compile()
        training.step()
        synchronize(device)
        return time.perf_counter() - began


def _peak(training: Training, before: int, device: torch.device, mode: str | None) -> int | None:
    """Return the most bytes that a step allocates, parameters and optimizer included; ``before`` are those of others.

    None on a CPU, and under CUDA graphs: a replay uses memory that the allocator handed out at the capture, so the
    peak would lack what the step computes.
    """
    training.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    training.step()
    synchronize(device)
    counted = device.type == "cuda" and mode != "reduce-overhead"
    return torch.cuda.max_memory_allocated(device) - before if counted else None


def _kernels(training: Training, device: torch.device, steps: int = 3) -> dict[str, float]:
    """Return the seconds of each kernel in a step, by name; empty on a CPU."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            training.step()
        synchronize(device)
    return {event.key: event.self_device_time_total / (1e6 * steps) for event in profiler.key_averages()}


def _longest(kernels: Mapping[str, float], count: int = 30) -> list[tuple[str, float]]:
    ordered = sorted(kernels.items(), key=lambda item: item[1], reverse=True)
    return [(name[:120], seconds) for name, seconds in ordered[:count]]


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)
