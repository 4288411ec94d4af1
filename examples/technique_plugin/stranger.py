"""Installs wheels of fp4graph and of this package into a new environment, and runs the tests, which train.

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
SOURCES = ["fp4graph", "plugins", "policies", "pyproject.toml", "README.md", "LICENSE"]
INSTALLED = "import sys, {0}; assert {0}.__file__.startswith(sys.prefix), 'not the installed wheel'"


def run(*command: object) -> None:
    print("$", *(Path(part).name if isinstance(part, Path) else part for part in command), flush=True)
    subprocess.run([str(part) for part in command], check=True, cwd=tempfile.gettempdir())


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
        for package in ("fp4graph", "plugin"):
            run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", work / "wheels", work / package)
        wheels = sorted((work / "wheels").glob("*.whl"))
        run(*pip, "--python", python, "install", "--no-deps", "--no-index", *wheels)
        run(work / "env/bin/fp4graph", "techniques", "mse_scale")
        for module in ("fp4graph", "mse_scale"):
            run(python, "-c", INSTALLED.format(module))
        run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", work / "plugin/tests")
    print("a stranger's technique: installed, listed, trained")


if __name__ == "__main__":
    main()
