"""Builds fp4graph as it is published, installs the wheels of fp4graph and of this package into a new environment, and
works there in an empty folder: looks around, compares policies, and runs the tests of this package, which train.

A .pth file gives the new environment the dependencies (torch, pydantic, ...) of the interpreter that runs this script;
installing them again would take gigabytes. Python looks up such packages after the installed ones, and ignores their
.pth files (of an editable fp4graph, for instance), so fp4graph comes from the wheel. The tests need pytest in the
interpreter that runs this script.
"""

import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: The sources of fp4graph's wheel. They are copied first, because building writes files next to the sources.
SOURCES = ["fp4graph", "plugins", "policies", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"]
COMPARISON = "digits --policies tetrajet --seeds 1 --steps 20 --backend eager --validation-batches 2 --output compared"
INSTALLED = "import sys, {0}; assert {0}.__file__.startswith(sys.prefix), 'not the installed wheel'"


def run(*command: object, folder: str | Path | None = None) -> None:
    print("$", *(Path(part).name if isinstance(part, Path) else part for part in command), flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=folder or tempfile.gettempdir())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        venv.create(work / "env")
        python = work / "env/bin/python"
        (site,) = (work / "env/lib").glob("python*/site-packages")
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
        ignore = shutil.ignore_patterns("__pycache__")
        for name in SOURCES:
            source, target = ROOT / name, work / "fp4graph" / name
            target.parent.mkdir(exist_ok=True)
            shutil.copytree(source, target, ignore=ignore) if source.is_dir() else shutil.copy(source, target)
        shutil.copytree(HERE, work / "plugin", ignore=ignore)
        pip = [Path(sys.executable), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        build = Path(sys.executable), "-m", "build", "--quiet", "--no-isolation", "--outdir", work / "dist"
        run(*build, work / "fp4graph")  # the sdist, and from it the wheel
        run(Path(sys.executable), "-m", "twine", "check", "--strict", *sorted((work / "dist").iterdir()))
        run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", work / "dist", work / "plugin")
        wheels = sorted((work / "dist").glob("*.whl"))
        run(*pip, "--python", python, "install", "--no-deps", "--no-index", *wheels)
        command, empty = work / "env/bin/fp4graph", work / "empty"
        empty.mkdir()
        for words in ("doctor", "policies", "techniques mse_scale", f"compare {COMPARISON}"):
            run(command, *words.split(), folder=empty)
        assert (empty / "compared/report.html").is_file(), sorted((empty / "compared").iterdir())
        for module in ("fp4graph", "mse_scale"):
            run(python, "-c", INSTALLED.format(module))
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", work / "plugin/tests")
    print("a stranger's technique: installed, listed, trained")


if __name__ == "__main__":
    main()
