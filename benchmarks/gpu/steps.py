"""The timings of ``make gpu-validate``: training steps, quantized beside unquantized, with every switch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch._inductor import utils as inductor
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

    Peak memory is the most that one program's steps allocate, parameters and optimizer included. Compile time is that
    of the first step with an empty cache.
    """
    torch._dynamo.reset()
    chosen = SWITCHES[switch]
    with ExitStack() as stack:
        # The compilers' caches stay until both programs have run, because kernels may be loaded late.
        caches = stack.enter_context(TemporaryDirectory(prefix="gpu_steps-", ignore_cleanup_errors=True))
        baseline, baseline_figures = _ready(stack, model, UNQUANTIZED, dtype, chosen, device, backend, caches)
        quantized, policy_figures = _ready(stack, model, policy, dtype, chosen, device, backend, caches)
        ready()
        comparison = compare(baseline.step, quantized.step, device, Patience(seconds=seconds, least=5), warm_up=2)
        baseline_kernels, kernels = (_kernels(training, device) for training in (baseline, quantized))
    return {
        **comparison.figures,
        "busy_seconds": sum(kernels.values()) or None,
        "baseline_busy_seconds": sum(baseline_kernels.values()) or None,
        "kernels": _longest(kernels),
        "baseline_kernels": _longest(baseline_kernels),
        **policy_figures,
        **{f"baseline_{name}": value for name, value in baseline_figures.items()},
    }


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


def _ready(
    stack: ExitStack,
    model: str,
    policy: str,
    dtype: str,
    switch: Switch,
    device: torch.device,
    backend: str,
    caches: str,
) -> tuple[Training, Mapping[str, float | None]]:
    """Return a compiled model in training, its compile time and its peak memory in bytes."""
    before = _allocated(device)
    size = SIZES.get(model, STEPS[model].size)
    mode = switch.mode if backend == "inductor" else None
    training = Training(STEPS[model], policy, size, DTYPES[dtype], device, backend, mode)
    stack.enter_context(switch.context() if policy != UNQUANTIZED else nullcontext())
    with _fresh_cache(backend, caches):
        began = time.perf_counter()
        training.compile()
        training.step()
        synchronize(device)
        compiling = time.perf_counter() - began
    training.step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    training.step()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    return training, {"compile_seconds": compiling, "peak_bytes": peak}


def _allocated(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


@contextmanager
def _fresh_cache(backend: str, caches: str) -> Iterator[None]:
    """Compile with an empty cache, a new folder under ``caches`` that stays when the context ends."""
    if backend != "inductor":
        yield
        return
    fresh: Any = getattr(inductor, "fresh_cache", None) or inductor.fresh_inductor_cache  # its former name
    with fresh(dir=caches, delete=False):
        yield
