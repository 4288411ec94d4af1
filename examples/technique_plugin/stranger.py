"""The whole way of a stranger: wheels of fp4graph and of this package in a new environment, and its tests, which train.

The new environment reaches the dependencies (torch, pydantic, ...) of the interpreter that runs this through a .pth
file: installing them again would take gigabytes. A package found that way is only looked up after those installed
here, and its own .pth files (an editable fp4graph, say) are not read, so that fp4graph is the wheel. The tests need
pytest in the interpreter that runs this.
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
#: What the wheel of fp4graph is made of. Building leaves files beside the sources, so it is done in a copy.
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
