"""Build shared libraries from C++ source, and load a library only if it is complete and nobody else can write to it.

Libraries are kept in Inductor's cache directory. A file name has two digests: of the source, compiler and flags, and of
the library's bytes. The second reveals a truncated library, which would end the process by a signal if it were loaded.
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

#: The exceptions that :func:`load` raises.
FAILURES = (OSError, subprocess.SubprocessError, ValueError)

# -ffp-contract=off: a fused multiply-add rounds once where the tensor code rounds twice. -fno-math-errno and
# -fno-trapping-math let the compiler inline rounding functions. The C++ library is in _LIBRARIES because a C compiler,
# which is used if its C++ compiler is not installed, does not link the C++ library by itself.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_ON_MAC = platform.system() == "Darwin"
_MACHINE_FLAGS = () if _ON_MAC else ("-fopenmp", "-march=native")
_LIBRARIES = ("-lc++",) if _ON_MAC else ("-lstdc++", "-lm")
_CXX_OF = {"gcc": "g++", "clang": "clang++", "cc": "c++"}
_INCLUDE = re.compile(r'^#include "(.+)"\n', re.MULTILINE)


def amalgamated(folder: Traversable, name: str) -> str:
    """Return the source file ``name`` of ``folder``, with the files of ``folder`` that it includes inserted, each once.

    :func:`load` derives a library's name from this text, so a changed header makes another library.
    """
    included = set()

    def text(name: str) -> str:
        if name in included:
            return ""
        included.add(name)
        source = folder.joinpath(name).read_text("utf-8").replace("#pragma once\n", "")
        return _INCLUDE.sub(lambda line: text(line[1]), source)

    return text(name)


def load(source: str) -> ctypes.CDLL:
    """Return the library of the C++ ``source``. Build it unless the cache has a complete library that loads.

    Raises:
        OSError: there is no compiler or no folder for libraries, or the built library does not load.
        subprocess.SubprocessError: the compiler refuses the source.
        ValueError: CXX cannot be split into words.
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
    """Return the command of the C++ compiler: the value of CXX, such as "ccache g++ -m64", or Inductor's command.

    Raises:
        ValueError: the command cannot be split into words.
    """
    text = os.environ.get("CXX", "").strip() or inductor_command() or ""
    try:
        words = shlex.split(text) or ["g++"]
    except ValueError as error:
        raise ValueError(f"the compiler command {text!r} cannot be split into words: {error}") from error
    return [_cxx(word) for word in words]


def inductor_command() -> str | None:
    """Return the command in Inductor's setting ``cpp.cxx``: by default CXX as of torch's import, or g++."""
    from torch._inductor import config

    choice = config.cpp.cxx if isinstance(config.cpp.cxx, list | tuple) else (config.cpp.cxx,)
    return next((name for name in choice if name), None)


def cxx_command(command: str) -> str:
    """Return ``command`` with each C compiler replaced by a C++ compiler that is installed beside it or on PATH.

    gcc compiles C++ but links no C++ library. PEFT's BOFT sets CXX to gcc when it is imported.
    """
    return shlex.join(map(_cxx, shlex.split(command)))


def _cxx(word: str) -> str:
    folder, name = os.path.split(word)
    parts = re.fullmatch(r"(.*-)?(gcc|clang|cc)(-[\d.]+)?", name)
    if parts is None:
        return word
    before, kind, version = parts.groups(default="")
    cxx = f"{before}{_CXX_OF[kind]}{version}"
    places = os.path.join(folder, cxx), cxx
    return next(filter(shutil.which, places), word)


def reason(error: Exception) -> str:
    """Return the most informative line of an exception that :func:`load` raised."""
    lines = str(getattr(error, "stderr", None) or error).splitlines()
    return next((line for line in lines if "error" in line), lines[-1] if lines else type(error).__name__).strip()


def _folder() -> Path:
    """Return the user's folder for libraries. It lies in Inductor's cache directory, which several users may share."""
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
    """Build the library of ``source`` and move it into ``folder`` in one step; return its file."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        code, built = Path(temporary, "kernel.cpp"), Path(temporary, "kernel.so")
        code.write_text(source)
        options = *_FLAGS, *_MACHINE_FLAGS, str(code), *_LIBRARIES, "-o", str(built)
        subprocess.run([*compiler, *options], check=True, capture_output=True, text=True)
        built.chmod(0o700)
        _to_disk(built)
        library = folder / f"{key}-{_digest(built.read_bytes())}.so"
        built.replace(library)  # other processes may build the same library
    _to_disk(folder)
    return library


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _require_private(path: Path) -> None:
    """Raise an OSError unless ``path`` belongs to the user or to root, and nobody else may write to it."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to another user, who could put any code there")
    if status.st_mode & 0o022:
        raise PermissionError(f"{path} can be written by other users, who could put any code there")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


@functools.cache
def _machine() -> str:
    """Return what -march=native depends on. It is part of the digest because machines may share a cache directory."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next(line for line in lines if line.startswith(("flags", "Features")))  # on x86, on ARM
    except (OSError, StopIteration):
        flags = platform.processor()
    return platform.machine() + flags
