"""The functions that a rewritten graph calls at its sites: one for each program, with the same name in any process.

torch keeps compiled graphs in a cache on disk, and the cache key holds only the name of a function. So the name here
identifies the function's behaviour: it holds a digest of the program, of this package's source, and of the source of
the program's techniques. A graph that calls such functions may be cached like any other (:func:`cacheable`).
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from fp4graph import torch_internals
from fp4graph.kernels import switches
from fp4graph.kernels.switches import Switches
from fp4graph.numerics import noise
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.matmul import quantized_matmul

_PREFIX = "fp4graph_site_"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
#: The folders and files of the package that affect what a graph computes.
_COMPUTING = ("numerics", "ops", "kernels", "graph", "technique", "torch_internals.py")


def site_function(program: MatmulProgram, form: str, alpha: float, beta: float) -> Callable[..., Tensor]:
    """Return the function that replaces a node: one object for all sites of equal program and form.

    The call is ``f(a, b, addend, key, step, salt, *state, site=...)``. Form ``linear`` takes ``a [..., K]`` and
    ``b [N, K]``; ``matmul`` takes ``a [..., M, K]`` and ``b [..., K, N]`` with ``torch.matmul``'s broadcasting;
    ``turned`` takes ``a [..., K, M]`` and ``b [..., N, K]``, and returns ``[..., N, M]``; ``grouped`` takes
    ``a [T, K]``, ``b [E, K, N]`` and, as ``ends=``, the cumulative numbers of tokens ``[E]``; ``autocast=False`` leaves
    the factors' dtype under autocast, as torch's grouped product does.
    """
    return _site_function(program, form, alpha, beta, switches.current())


@functools.lru_cache(maxsize=1024)
def _site_function(
    program: MatmulProgram, form: str, alpha: float, beta: float, kernels: Switches
) -> Callable[..., Tensor]:
    def fp4graph_matmul(
        a: Tensor,
        b: Tensor,
        addend: Tensor | None,
        key: Tensor | None,
        step: Tensor | None,
        salt: int,
        *state: Tensor,
        site: str | None = None,
        ends: Tensor | None = None,
        autocast: bool = True,
    ) -> Tensor:
        if key is not None and salt:
            key = noise.derive(key, salt)
        if form in ("matmul", "grouped"):
            slots = zip(program.state, state, strict=True)
            b, state = b.mT, tuple(entry.mT if slot.entry.weight_like else entry for slot, entry in slots)
        if form == "grouped":
            return quantized_matmul(program, a, b, None, key, step, state, site, ends=ends, autocast=autocast)
        if form == "turned":
            a = a.mT
            addend = None if addend is None else torch.atleast_2d(addend).mT  # type: ignore[no-untyped-call]
        if b.dim() == 2:
            # All leading axes become one axis of tokens: blocks of the weight gradient's GEMM run along it.
            flat = a.flatten(0, -2) if a.dim() > 2 else a.unsqueeze(0) if a.dim() == 1 else a
            if addend is not None and addend.dim() > 1 and a.dim() > 2:  # an operator of a library adds a residual
                addend = addend.expand(*a.shape[:-1], addend.shape[-1]).flatten(0, -2)
            y = quantized_matmul(program, flat, b, addend, key, step, state, site, alpha=alpha, beta=beta)
            y = y.reshape(*a.shape[:-1], b.shape[0])
        else:
            batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
            left, right = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
            y = quantized_matmul(program, left, right, addend, key, step, state, site, alpha=alpha, beta=beta)
        return y.mT.contiguous() if form == "turned" else y

    # The text of a function in a technique's options has its address, which differs from process to process.
    description = _ADDRESS.sub("", repr((program, form, alpha, beta, kernels, _techniques_digest(program))))
    name = f"{_PREFIX}{form}_{hashlib.sha256(description.encode()).hexdigest()[:16]}"
    if name in globals():  # two programs whose texts are equal
        name += os.urandom(8).hex()
    fp4graph_matmul.__name__ = fp4graph_matmul.__qualname__ = name
    globals()[name] = fp4graph_matmul  # the graph's code looks the function up here
    return fp4graph_matmul


@contextmanager
def cacheable(gm: GraphModule) -> Iterator[None]:
    """In this context, let torch's caches hold a graph that calls site functions."""
    modules = [module for module in gm.modules() if isinstance(module, GraphModule)]
    targets = (node.target for module in modules for node in module.graph.nodes if node.op == "call_function")
    names = {str(getattr(target, "__name__", "")) for target in targets}
    versions = {f"{__name__}.{name}": torch.__version__ for name in sorted(names) if name.startswith(_PREFIX)}
    with torch_internals.functions_cached(versions):
        yield


def _techniques_digest(program: MatmulProgram) -> str:
    gemms = (program.fprop, program.dgrad, program.wgrad)
    parts = [part for gemm in gemms for part in (*gemm.transforms, *gemm.left.parts, *gemm.right.parts)]
    classes: set[type] = {type(each) for part in parts for each in (part, part.options)}
    return _digest(_source(base) for cls in {MatmulProgram, *classes} for base in cls.__mro__)


@functools.cache
def _source(cls: type) -> bytes:
    """Return a digest of the files of ``cls``'s package, all of which the code of ``cls`` may call.

    The digest is random for a class that was made in a function or has no file: no file holds all of its code.
    """
    try:
        file = Path(inspect.getfile(cls))
    except (OSError, TypeError):
        return b"" if cls.__module__ == "builtins" else os.urandom(16)
    if "<locals>" in cls.__qualname__ or not file.is_file():
        return os.urandom(16)
    name = cls.__module__.partition(".")[0]
    folders = [Path(folder) for folder in getattr(sys.modules.get(name), "__path__", ())]
    if name == "fp4graph":
        folders = [folder / part for folder in folders for part in _COMPUTING]
    return _files_digest(tuple(folders) or (file,))


@functools.cache
def _files_digest(places: tuple[Path, ...]) -> bytes:
    files = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else (place,))]
    return _digest(file.read_bytes() for file in files).encode()


def _digest(parts: Iterable[bytes]) -> str:
    """Return a digest of all parts, in any order."""
    return hashlib.sha256(b"".join(sorted(hashlib.sha256(part).digest() for part in parts))).hexdigest()
