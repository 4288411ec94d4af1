"""Builds shared libraries from C++ source, and loads only those that are whole and the user's own.

A library is kept in Inductor's cache directory. Its file is named by a digest of all that it is built from, and by a
digest of its own bytes: to load a truncated library would end the process by a signal, which no caller can catch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from importlib.resources.abc import Traversable
from pathlib import Path

#: What :func:`load` raises.
FAILURES = (OSError, subprocess.SubprocessError, ValueError)

# -ffp-contract=off: a fused multiply-add rounds once where the tensor code rounds twice. The next two promise that
# nobody reads errno or floating-point exceptions; without them rounding functions are not inlined. The C++ library is
# named for a C compiler that has no C++ compiler beside it.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_ON_MAC = platform.system() == "Darwin"
_MACHINE_FLAGS = () if _ON_MAC else ("-fopenmp", "-march=native")
_LIBRARIES = ("-lc++",) if _ON_MAC else ("-lstdc++", "-lm")
_OF_CXX = {"gcc": "g++", "clang": "clang++", "cc": "c++"}


_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def amalgamated(folder: Traversable, name: str) -> str:
    """Return the source ``name`` of ``folder`` with the files of ``folder`` that it includes in place, each once.

    One text is what :func:`load` names a library by, so that a changed header is another library.
    """
    included = set()

    def text(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        own = folder.joinpath(name).read_text("utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda line: text(line[1]), own)

    return text(name)


def load(source: str) -> ctypes.CDLL:
    """Return the library of the C++ ``source``, built unless a whole one that loads is in the cache.

    Raises:
        OSError: there is no compiler, no folder for libraries, or the built library does not load.
        subprocess.SubprocessError: the compiler refuses the source. ValueError: CXX names no command.
    """
    folder, compiler = _folder(), command()
    key = _digest("\0".join([_machine(), *compiler, *_FLAGS, *_MACHINE_FLAGS, *_LIBRARIES, source]).encode())
    for path in sorted(folder.glob(f"{key}-*.so")):
        try:
            return _loaded(path)
        except OSError:
            continue  # damaged, or built for another system's libraries
    return _loaded(_built(source, compiler, folder, key))


def require_compiler() -> None:
    """Raise an OSError if there is no C++ compiler."""
    program = command()[0]
    if shutil.which(program) is None:
        raise FileNotFoundError(f"no such program: {program}")


def command() -> list[str]:
    """Return the command of the C++ compiler: what CXX says, such as "ccache g++ -m64", or what Inductor would run."""
    words = shlex.split(os.environ.get("CXX", "")) or shlex.split(inductor_command() or "") or ["g++"]
    return [_cxx(word) for word in words]


def inductor_command() -> str | None:
    """Return the command that Inductor's setting names, which was CXX when torch read it."""
    from torch._inductor import config

    choice = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
    return next((name for name in choice if name), None)


def cxx_command(command: str) -> str:
    """Return ``command`` with the C++ compiler of each C compiler, if one is installed beside it or on the PATH.

    gcc compiles C++ but links no C++ library, and CXX is gcc where PEFT's BOFT has been imported.
    """
    return shlex.join(map(_cxx, shlex.split(command)))


def _cxx(word: str) -> str:
    folder, name = os.path.split(word)
    parts = re.fullmatch(r"(.*-)?(gcc|clang|cc)(-[\d.]+)?", name)
    if parts is None:
        return word
    before, kind, version = parts.groups(default="")
    linking = f"{before}{_OF_CXX[kind]}{version}"
    places = os.path.join(folder, linking), linking
    return next(filter(shutil.which, places), word)


def reason(error: Exception) -> str:
    """Return the line of what :func:`load` raised that says most."""
    said = str(getattr(error, "stderr", None) or error).splitlines()
    return next((line for line in said if "error" in line), said[-1] if said else type(error).__name__).strip()


def _folder() -> Path:
    """Return the user's folder for libraries, in Inductor's cache directory, which users may share."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder = Path(cache_dir(), f"fp4graph-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_private(folder)
    return folder


def _loaded(path: Path) -> ctypes.CDLL:
    _require_private(path)
    if not path.stem.endswith(_digest(path.read_bytes())):
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path))


def _built(source: str, compiler: list[str], folder: Path, key: str) -> Path:
    """Build the library of ``source`` and return its file in ``folder``, which appears there whole."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        code, built = Path(temporary, "kernel.cpp"), Path(temporary, "kernel.so")
        code.write_text(source)
        options = *_FLAGS, *_MACHINE_FLAGS, str(code), *_LIBRARIES, "-o", str(built)
        subprocess.run([*compiler, *options], check=True, capture_output=True, text=True)
        built.chmod(0o700)
        _to_disk(built)
        library = folder / f"{key}-{_digest(built.read_bytes())}.so"
        built.replace(library)  # other processes may build the same
    _to_disk(folder)
    return library


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_private(path: Path) -> None:
    """Raise an OSError unless ``path`` is the user's, or root's, and nobody else may write to it."""
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user, who could put any code there")
    if found.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by other users, who could put any code there")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


@functools.cache
def _machine() -> str:
    """Return what -march=native depends on; a cache directory may be shared between machines."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    return platform.machine() + flags
