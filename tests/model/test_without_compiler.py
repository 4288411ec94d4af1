"""Inductor without a working C++ compiler: the error says what to install and what runs without a compiler.

A C compiler works. A cache folder that is a file is an error.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config, cpp_builder
from torch._inductor.exc import CppCompileError

import fp4graph
from fp4graph.kernels import operators
from fp4graph.kernels.inductor import compiler_errors
from tests.helpers.processes import python, run
from tests.kernels.models import Net

REMEDY = r"nonexistent.*g\+\+.*CXX.*backend='eager'"


@pytest.fixture
def no_compiler() -> Iterator[None]:
    cpp_builder.cpp_compiler_search.cache_clear()
    with operators.tensor_code(), config.patch({"cpp.cxx": (None, "/nonexistent/c++")}):
        yield
    cpp_builder.cpp_compiler_search.cache_clear()


@pytest.mark.slow
@pytest.mark.usefixtures("no_compiler")
def test_apply_raises_without_a_compiler_or_beside_an_accelerator_the_first_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    model = Net()
    with pytest.raises(fp4graph.Error, match=REMEDY):
        fp4graph.apply(model, "mxfp4")
    assert not model._forward_pre_hooks
    fp4graph.apply(model, "mxfp4", backend="aot_eager")(torch.ones(2, 64))
    with monkeypatch.context() as accelerator:
        accelerator.setattr(torch.accelerator, "is_available", lambda: True)
        beside: nn.Module = fp4graph.apply(Net(), "mxfp4")
    with pytest.raises(fp4graph.Error, match=REMEDY):
        beside(torch.ones(2, 64))


def test_the_failure_of_a_compiler_is_shown_with_a_remedy() -> None:
    """Inductor wraps the errors of the compiler and of the linker, as if Python's headers are missing."""
    refusal = CppCompileError(["g++"], "a.cpp:1: fatal error: Python.h: No such file")
    with pytest.raises(fp4graph.Error, match=r"fatal error: Python.h: No such file.*python3-dev"), compiler_errors():
        raise RuntimeError("Inductor failed") from refusal
    unlinked = ImportError("a.main.so: undefined symbol: _ZTTNSt7__cxx1119basic_ostringstream")
    with pytest.raises(fp4graph.Error, match=r"undefined symbol.*g\+\+"), compiler_errors():
        raise RuntimeError("Inductor failed") from unlinked
    with pytest.raises(RuntimeError, match="another"), compiler_errors():
        raise RuntimeError("another")


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.process
@pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("g++") is None, reason="needs gcc and g++")
def test_inductor_runs_with_a_c_compiler(tmp_path: Path) -> None:
    """Inductor's code needs the C++ library, which gcc does not link by itself. torch reads CXX when it is imported."""
    lines = (
        "import torch, fp4graph",
        "from tests.kernels.models import Net",
        "model = fp4graph.apply(Net(), 'mxfp4')",
        "model(torch.ones(2, 64)).sum().backward()",
    )
    run(python("-c", "\n".join(lines)), env={"CXX": "gcc", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)})


@pytest.mark.process
def test_a_cache_folder_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    """torch cannot import Dynamo with such a folder."""
    cache = tmp_path / "cache"
    cache.touch()
    said = f"fp4graph.errors.Error: torch cannot compile: its folder of compiled code, {re.escape(str(cache))}"
    with pytest.raises(AssertionError, match=said):
        run(python("-c", "import fp4graph"), env={"TORCHINDUCTOR_CACHE_DIR": str(cache)})
