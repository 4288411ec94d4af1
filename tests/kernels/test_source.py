"""The C++ source is several files, built as one text."""

from __future__ import annotations

import tomllib
from fnmatch import fnmatch
from pathlib import Path

from fp4graph.kernels import build, measures

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "fp4graph/kernels/cpp"


def test_each_included_file_is_inserted_once(tmp_path):
    (tmp_path / "a.cpp").write_text('#include "b.h"\n#include "c.h"\nint a = b + c;\n')
    (tmp_path / "b.h").write_text('#pragma once\n#include <cmath>\n#include "c.h"\nint b = c;\n')
    (tmp_path / "c.h").write_text("#pragma once\nint c = 1;\n")
    assert build.amalgamated(tmp_path, "a.cpp") == "#include <cmath>\nint c = 1;\nint b = c;\nint a = b + c;\n"


def test_every_file_is_part_of_the_text_of_a_library():
    libraries = [build.amalgamated(FOLDER, name) for name in ("common.cpp", "quantizer.h", "choices.h")]
    assert not [text for text in libraries if '#include "' in text]
    for file in FOLDER.iterdir():
        kept = [line for line in file.read_text().splitlines() if not line.startswith(("#include", "#pragma once"))]
        assert max(text.count("\n".join(kept[-10:])) for text in libraries) == 1, file.name


def test_python_knows_the_longest_block_that_cpp_holds():
    assert f"constexpr i64 LONGEST = {measures._LONGEST};" in (FOLDER / "choices.h").read_text()


def test_the_wheel_takes_every_file():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = settings["package-data"]["fp4graph.kernels.cpp"]
    files = [file.name for file in FOLDER.iterdir()]
    assert len(files) > 10
    assert not [file for file in files if not any(fnmatch(file, glob) for glob in globs)]
