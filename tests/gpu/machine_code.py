"""Code that Inductor and Triton generate for an absent GPU, and its machine code. For workers (conftest.py)."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.compiler import ASTSource, CompiledKernel

from benchmarks.gpu.absent import Gpu, Stop, install, stopping
from fp4graph.kernels import operators


@dataclass(frozen=True, eq=False)
class Generated:
    """Inductor's code: a Python module of Triton kernels and their launches, and the constants that precede its
    arguments."""

    source: str
    constants: list[Tensor]


def generate(
    gpu: Gpu, function: Callable[..., Any], args: Sequence[Tensor], options: Mapping[str, Any], *, dynamic: bool = False
) -> Generated:
    """Return Inductor's code for ``function`` on ``gpu``, with quantizers as tensor code.

    Args:
        function: returns a tuple of tensors.
        args: give shapes, strides and dtypes; their device and data do not matter.
        options: of Inductor.
        dynamic: whether the sizes of the first argument are symbolic.
    """
    install(gpu)
    mode = FakeTensorMode(shape_env=ShapeEnv() if dynamic else None)
    shapes = [mode.from_tensor(arg, static_shapes=not (dynamic and index == 0)) for index, arg in enumerate(args)]

    def stop(code: str) -> None:
        raise Stop(code)

    with mode, operators.tensor_code():
        fakes = [torch.empty_strided(s.shape, s.stride(), dtype=s.dtype, device="cuda") for s in shapes]
        graph = make_fx(function)(*fakes)
    with stopping(stop), inductor.patch(dict(options)):
        try:
            compile_fx(graph, fakes)
        except Stop as stopped:
            return Generated(str(stopped), list(graph.buffers()))
    raise AssertionError("Inductor compiled nothing")


@dataclass(frozen=True)
class Binary:
    """One kernel compiled for one GPU."""

    kernel: str
    config: str  # block sizes and warps
    ptx: str  # the virtual assembly
    cubin: bytes  # the machine code
    registers: int  # of a thread
    spilled: int  # bytes of a thread that did not fit into registers


def _kernels(generated: Generated) -> list[Any]:
    """Return Inductor's autotuners around the Triton functions, not yet compiled."""
    sources: dict[str, str] = {}

    def collect(self: AsyncCompile, name: str, kernel: str, *args: Any, **kwargs: Any) -> None:
        sources[name] = kernel

    with mock.patch.object(AsyncCompile, "triton", collect):
        PyCodeCache.load(generated.source)
    return [getattr(PyCodeCache.load(kernel), name) for name, kernel in sources.items()]


def compile_generated(gpu: Gpu, generated: Generated, *, every: bool = False) -> list[Binary]:
    """Return the machine code of every kernel in code that was generated for ``gpu``.

    Args:
        every: compile all configurations from which Inductor would choose on the card, not only the first.
    """
    install(gpu)
    binaries = []
    with inductor.patch(use_static_triton_launcher=False):
        for kernel in _kernels(generated):
            for config in kernel.configs if every else kernel.configs[:1]:
                binaries.append(_binary(kernel._precompile_config(config).kernel, str(config)))
    return binaries


def compile_written(
    gpu: Gpu,
    function: Any,
    signature: Mapping[str, Any],
    constants: Mapping[str, Any],
    aligned: Sequence[str],
    **options: Any,
) -> Binary:
    """Return the machine code of a Triton function.

    Args:
        signature: the Triton types of the arguments that are not constants.
        constants: the values of the other arguments.
        aligned: arguments that are multiples of 16, which Triton detects at a launch.
        options: of the launch.
    """
    names = function.arg_names

    def places(name: str) -> list[tuple[int, ...]]:
        first, kind = names.index(name), signature[name]
        return [(first, i) for i in range(len(kind))] if isinstance(kind, tuple) else [(first,)]

    source = ASTSource(
        function,
        {name: signature.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {place: [["tt.divisibility", 16]] for name in aligned for place in places(name)},
    )
    return _binary(triton.compile(source, target=gpu.target, options=options), "")


def _binary(compiled: CompiledKernel, config: str) -> Binary:
    cubin = compiled.asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    used = {name: int(number) for name, number in re.findall(r"([A-Z]+):(\d+)", usage)}
    spilled = used["STACK"] + used["LOCAL"]
    return Binary(compiled.metadata.name, config, compiled.asm["ptx"], cubin, used["REG"], spilled)
