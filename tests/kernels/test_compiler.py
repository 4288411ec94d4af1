"""Kernels are compiled on the machine where they run: no compiler, one that fails, caches, two processes at once."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp4graph.errors import Error
from fp4graph.kernels import abi, build, cpu, operators, switches
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
from fp4graph.numerics.quantize import fake_quantize
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from tests.helpers.floats import assert_same_bits
from tests.helpers.processes import IMPORTS, PATIENCE
from tests.kernels.models import train

pytestmark = [pytest.mark.compiler, pytest.mark.process]

POLICY = "tetrajet"


def start(code: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """Start a Python process that prints JSON, with ``folder`` as its cache."""
    variables = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), **IMPORTS, **environment}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], env=variables, **pipes)


def answer(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, out + err
    return json.loads(out.splitlines()[-1])


def compiler(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


# ------------------------------------------------------------------ without kernels

TRAINING = f"""
import json, warnings
from tests.kernels.models import train
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    weights = [train({POLICY!r}).tolist() for _ in range(2)]
warned = [str(w.message) for w in said if "kernel" in str(w.message)]
print(json.dumps({{"weights": weights, "warnings": warned}}))
"""


@pytest.fixture(scope="module")
def trained():
    """Return the weights after training with kernels."""
    assert switches.current().quantizers
    assert cpu.available()
    return train(POLICY)


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "warned"),
    [({"CXX": "/nonexistent/compiler"}, True), ({"FP4GRAPH_KERNELS": "0"}, False)],
    ids=["no compiler", "switched off"],
)
def test_training_without_kernels_gives_the_same_bits(environment, warned, trained, tmp_path):
    """If kernels are not switched off, one warning says what to do."""
    said = answer(start(TRAINING, tmp_path, **environment))
    assert not list(tmp_path.rglob("*.so"))
    for weights in said["weights"]:
        assert_same_bits(torch.tensor(weights), trained)
    assert len(said["warnings"]) == warned
    for warning in said["warnings"]:
        assert all(words in warning for words in ("/nonexistent/compiler", "Install g++", "CXX"))


def forget() -> None:
    for cached in (cpu.available, abi._load, abi.function, abi.common):
        cached.cache_clear()


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """Return a folder with an empty cache; the process forgets which kernels it has loaded."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


def test_a_compiler_that_refuses_the_source(fresh, trained, monkeypatch):
    """The warning has the compiler's message. No half-written library is left."""
    body = """for last; do :; done
printf half > "$last"
echo "quantize.cpp: In function 'f':" >&2
echo "quantize.cpp:1: error: too modern for me" >&2
exit 1"""
    monkeypatch.setenv("CXX", compiler(fresh / "old-c++", body))
    with pytest.warns(UserWarning, match=r"error: too modern for me.*CXX") as said:
        weights = train(POLICY)
    assert len([w for w in said if "kernel" in str(w.message)]) == 1
    assert_same_bits(weights, trained)
    assert [path for path in (fresh / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.long
def test_a_compiler_that_has_gone_since_the_cache_was_filled(fresh, trained, monkeypatch):
    """The cache has the library of the trial, but no quantizer."""
    assert cpu.available()
    forget()
    (fresh / "empty").mkdir()
    monkeypatch.setenv("PATH", str(fresh / "empty"))
    with pytest.warns(UserWarning, match=r"no such program: .*Install g\+\+"):
        assert_same_bits(train(POLICY), trained)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gcc", "ccache gcc", " "])
def test_a_c_compiler(name, fresh, monkeypatch):
    """It does not link the C++ library by itself. PEFT's BOFT leaves CXX=gcc behind. ccache precedes a compiler's name.
    A blank name counts as none."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    compiler(fresh / "ccache", 'exec "$@"')
    monkeypatch.setenv("PATH", f"{fresh}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CXX", name)
    x = torch.randn(8, 64)
    values, packed = operators.quantize_and_pack(x, QuantSpec(), None, x.dtype)
    assert_same_bits(values, fake_quantize(x, QuantSpec()))
    assert_same_bits(packed.unpack(), values)  # unpacking needs the C++ library


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "the cache is a file": lambda cache: cache.touch(),
    "the folder is a file": lambda cache: (cache.mkdir(), folder_of(cache).touch()),
    "others can write to the folder": lambda cache: (
        folder_of(cache).mkdir(parents=True),
        folder_of(cache).chmod(0o777),
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_cache_that_cannot_be_used_is_warned_of_once(case, fresh):
    UNUSABLE[case](fresh / "cache")
    with pytest.warns(UserWarning, match=r"cannot be built and loaded .*TORCHINDUCTOR_CACHE_DIR") as said:
        assert not any(of_spec(QuantSpec(), torch.device("cpu")) != TENSOR_CODE for _ in range(2))
    assert len(said) == 1


@pytest.mark.long
def test_a_cache_on_a_file_system_mounted_noexec(fresh, trained, monkeypatch):

    def refuse(path):
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(build.ctypes, "CDLL", refuse)
    with pytest.warns(UserWarning, match="failed to map segment"):
        assert_same_bits(train(POLICY), trained)


# ------------------------------------------------------------------ libraries in the cache

NUMBER = 'extern "C" int number() { return 7; }'


def folder_of(cache: Path) -> Path:
    return cache / f"fp4graph-{os.geteuid()}"


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda library: os.truncate(library, library.stat().st_size // 4),
    "empty": lambda library: os.truncate(library, 0),
    "another file": lambda library: library.write_text("not compiled"),
    "a flipped bit": lambda library: library.write_bytes(library.read_bytes().replace(b"number", b"numbes")),
    "others can write to it": lambda library: library.chmod(0o777),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_library_is_built_again(case, fresh):
    assert build.load(NUMBER).number() == 7
    (library,) = folder_of(fresh / "cache").iterdir()
    whole = library.read_bytes()
    library.unlink()  # this process has mapped the file
    library.write_bytes(whole)
    library.chmod(0o700)
    DAMAGES[case](library)
    damaged = library.stat().st_ino
    assert build.load(NUMBER).number() == 7
    assert library.read_bytes() == whole
    assert library.stat().st_ino != damaged
    assert stat.S_IMODE(library.stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_libraries_and_folders_of_another_user_are_not_used(fresh):
    build.load(NUMBER)
    (library,) = folder_of(fresh / "cache").iterdir()
    os.chown(library, 12345, -1)
    build.load(NUMBER)
    assert library.stat().st_uid == 0  # built again
    os.chown(library.parent, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to another user"):
        build.load(NUMBER)


def test_a_kernel_that_cannot_be_built_after_the_trial_is_an_error(fresh, monkeypatch):
    assert cpu.available()
    monkeypatch.setenv("CXX", compiler(fresh / "c++", "echo 'error: no space left on device' >&2; exit 1"))
    with pytest.raises(Error, match=r"no space left on device.*FP4GRAPH_KERNELS=0"):
        operators.quantize(torch.randn(4, 64), QuantSpec(), None)


# ------------------------------------------------------------------ two at once

SPEC = QuantSpec("int4", 32, ScaleSpec("ue5m3", "nearest_even"))
QUANTIZING = f"""
import json, torch
from fp4graph.numerics.spec import QuantSpec
from fp4graph.kernels import operators
from fp4graph.kernels.rows import TENSOR_CODE, of_spec
x = torch.arange(-300.0, 340.0).view(10, 64)
spec = QuantSpec.from_text({SPEC.to_text()!r})
assert of_spec(spec, x.device) != TENSOR_CODE
print(json.dumps(operators.quantize(x, spec).tolist()))
"""
#: Waits until ``$BUILDERS`` processes compile the same source, then compiles.
TOGETHER = """for word; do case "$word" in *.cpp) source="$word";; esac; done
name="$MEETING/$(cksum < "$source" | tr ' ' -)"
touch "$name.$$"
tries=0
while [ "$(ls "$name".* | wc -l)" -lt "$BUILDERS" ] && [ "$tries" -lt 12000 ]; do sleep 0.1; tries=$((tries + 1)); done
exec g++ "$@" """


@pytest.fixture
def builders(tmp_path):
    """Return a function that starts a process whose builds wait until ``count`` processes build the same source."""
    (tmp_path / "meeting").mkdir()
    environment = {"CXX": compiler(tmp_path / "c++", TOGETHER), "MEETING": str(tmp_path / "meeting")}
    return lambda count: start(QUANTIZING, tmp_path / "cache", BUILDERS=str(count), **environment)


@pytest.mark.long
def test_two_processes_build_the_same_kernel_at_once(builders, tmp_path):
    expected = fake_quantize(torch.arange(-300.0, 340.0).view(10, 64), SPEC)
    for process in [builders(2), builders(2)]:
        assert_same_bits(torch.tensor(answer(process)), expected)
    built = len(list((tmp_path / "meeting").iterdir()))
    assert built == 4  # both processes build the trial and the quantizer
    libraries = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert [path.suffix for path in libraries] == [".so", ".so"]
    assert_same_bits(torch.tensor(answer(builders(1))), expected)
    assert len(list((tmp_path / "meeting").iterdir())) == built  # nothing was compiled again


@pytest.mark.parametrize("line", ["flags : fpu avx2", "Features : fp asimd sve"])
def test_the_name_of_a_library_depends_on_the_features_of_the_processor(line, monkeypatch):
    monkeypatch.setattr(build.Path, "read_text", lambda _: f"processor : 0\n{line}\n")
    assert build._machine.__wrapped__().endswith(line)
