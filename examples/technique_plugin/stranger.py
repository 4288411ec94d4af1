"""The whole way of a stranger: wheels of fp4graph and of this package in a new environment, a policy, training.

The new environment reaches the dependencies (torch, pydantic, ...) of the interpreter that runs this through a .pth
file: installing them again would take gigabytes. A package found that way is only looked up after those installed
here, and its own .pth files (an editable fp4graph, say) are not read, so that fp4graph is the wheel.
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
TRAIN = """
import sys, torch, fp4graph, mse_scale
assert all(module.__file__.startswith(sys.prefix) for module in (fp4graph, mse_scale)), "not the installed wheels"
policy = {"version": 1, "name": "p", "default": {"element": "e1m2"}, "techniques": ["mse_scale"]}
model = fp4graph.apply(torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 1)), policy, backend="eager")
optimizer = fp4graph.prepare_optimizer(model, torch.optim.Adam(model.parameters(), lr=0.01))
x = torch.randn(64, 32)
for step in range(10):
    loss = (model(x) - x.mean(-1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
"""


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
        (work / "train.py").write_text(TRAIN)
        run(python, work / "train.py")
    print("a stranger's technique: installed, listed, trained")


if __name__ == "__main__":
    main()
