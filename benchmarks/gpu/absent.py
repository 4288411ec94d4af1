"""An absent GPU for Inductor and Triton, so that they generate and compile code for it on any machine.

Inductor asks torch for the device's properties and Triton for its target; :func:`install` answers both with those of a
real card. Tensors on the card are fake: shapes, strides and dtypes without data. Constant folding, which needs data, is
done on the CPU.

Only worker processes (:func:`worker`) may call :func:`install`, because it cannot be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch._dynamo import device_interface
from torch._inductor import config as inductor
from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.hints import DeviceProperties
from torch.utils import _triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget

from benchmarks.processes import process


@dataclass(frozen=True)
class Gpu:
    """A card as compilers see it; ``capability`` is 10·major + minor of its compute capability."""

    name: str
    capability: int
    multiprocessors: int

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    @property
    def properties(self) -> SimpleNamespace:
        """The result of ``torch.cuda.get_device_properties``; the limits are the same for both architectures."""
        return SimpleNamespace(
            name=self.name,
            major=self.capability // 10,
            minor=self.capability % 10,
            multi_processor_count=self.multiprocessors,
            regs_per_multiprocessor=65536,
            max_threads_per_multi_processor=2048,
            max_threads_per_block=1024,
            shared_memory_per_block=48 << 10,
            shared_memory_per_block_optin=227 << 10,
            warp_size=32,
        )


H200 = Gpu("NVIDIA H200", 90, 132)
B200 = Gpu("NVIDIA B200", 100, 148)
GPUS = {"H200": H200, "B200": B200}
#: Turns off Inductor's pool of compile processes, which takes longer to start than the compilation.
ENVIRONMENT = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}


@contextmanager
def worker(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """Start a process under ``environment``, which runs one task after another."""
    with process(**ENVIRONMENT, **environment) as pool:
        pool.submit(torch.set_num_threads, 1).result()
        yield pool


def install(gpu: Gpu) -> None:
    """Make this process behave as if it had one ``gpu``. A later call replaces the card."""
    properties = gpu.properties

    class Interface(device_interface.CudaInterface):
        is_available = staticmethod(lambda: True)
        device_count = staticmethod(lambda: 1)
        current_device = staticmethod(lambda: 0)
        get_device_properties = staticmethod(lambda device=None: properties)  # type: ignore[assignment]
        get_compute_capability = staticmethod(lambda device=None: gpu.capability)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)

    device_interface.get_interface_for_device("cpu")  # registers torch's own, which would replace ours later
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, Interface)
    device_interface.caching_worker_device_properties["cuda"] = [properties]
    device_interface.caching_worker_current_devices["cuda"] = 0
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device=None: properties  # type: ignore[assignment, return-value]
    torch.cuda.get_device_capability = lambda device=None: divmod(gpu.capability, 10)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: gpu.target))
    triton_helpers.set_driver_to_gpu = lambda: None
    UniformValueConstantFolder._deduce_value = _deduce_on_cpu  # type: ignore[method-assign]
    DeviceProperties.create.cache_clear()
    for helper in vars(_triton).values():  # forget answers about Triton from before the card was installed
        if hasattr(helper, "cache_clear"):
            helper.cache_clear()


class _OnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **{**(kwargs or {}), **({"device": "cpu"} if (kwargs or {}).get("device") else {})})


_deduce_value = UniformValueConstantFolder._deduce_value


def _deduce_on_cpu(self: UniformValueConstantFolder, node: torch.fx.Node) -> Any:
    with _OnCpu():  # type: ignore[no-untyped-call]
        return _deduce_value(self, node)


class Stop(BaseException):
    """Carries the code out of the compiler before it is loaded. Compilers would catch an Exception."""


@contextmanager
def stopping(stop: Callable[[str], None]) -> Iterator[None]:
    """Have Inductor call ``stop`` with the code that it has written, and use no caches."""
    settings = {"force_disable_caches": True, "shape_padding": False}  # padding measures on the card
    with inductor.patch(settings), mock.patch.object(GraphLowering, "save_output_code", staticmethod(stop)):
        yield
