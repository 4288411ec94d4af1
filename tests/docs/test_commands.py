"""Commands in the README and the pages run, or their arguments are at least parsed."""

from __future__ import annotations

import importlib
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import save_file
from typer.testing import CliRunner

from fp4graph.__main__ import app
from tests.docs.blocks import PAGES, ROOT, blocks, commands, of_language, pages_with

pytestmark = [pytest.mark.slow, pytest.mark.process]

SHELL = ("sh", "bash", "console")
#: Settings that make a training of a few seconds. They come last, so that they replace those of the page.
SMALL = ["--steps", "2", "--batch-size", "8", "--validation-batches", "1", "--device", "cpu", "--backend", "eager"]
#: Commands that are only parsed, each with the reason why it does not run.
PARSED = {
    r"fp4graph sweep (?!.*--export-policy)": "trains for minutes or hours; the fixture `sweep` runs a small one",
    r"fp4graph compare (deit-tiny|digits-augmented|gaussian)": "trains for minutes; README's comparison runs",
    r"fp4graph compare --train": "names a function of the reader's; tests/lab/test_compare.py runs one",
    r"fp4graph train countdown": "has a supervised start of 200 steps; test_reinforcement.py trains it",
    r"fp4graph train llama-\d+": "needs a GPU and data from the network",
    r"fp4graph search": "needs a model of the reader's; tests/lab/test_search.py runs it on one",
    r"fp4graph techniques mse_scale": "needs the package beside it; test_technique_plugin.py installs it",
}


def run(*words: str) -> str:
    """Run ``fp4graph`` with these arguments in this process."""
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, f"fp4graph {' '.join(words)}\n{result.output}\n{result.exception!r}"
    return result.output


def parse(command: Any, words: list[str]) -> None:
    """Parse the arguments of one of ``command``'s commands, as it does before it runs."""
    group: Any = typer.main.get_command(command)
    name, *arguments = words
    assert name in group.commands, f"no command {name!r}"
    with group.commands[name].make_context(name, arguments):
        pass


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Return the folder of a sweep of digits that has just enough results for every report."""
    folder = tmp_path_factory.mktemp("sweep") / "sweep-digits"
    run("sweep", "--task", "digits", "--trials", "4", "--output", str(folder), *SMALL)
    return folder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder with nothing but the policies of the README."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for block in blocks("README.md"):
        if block.language == "yaml" and (name := re.search(r"^name: (\S+)", block.text, re.MULTILINE)):
            (tmp_path / f"{name[1]}.yaml").write_text(block.text, encoding="utf-8")
    return tmp_path


def _fp4graph(words: list[str], get: Callable[[str], Any]) -> None:
    """Parse a command, and run it with small settings unless it is among :data:`PARSED`."""
    parse(app, words)
    line = "fp4graph " + " ".join(words)
    if any(re.match(pattern, line) for pattern in PARSED):
        return
    if any("sweep-" in word for word in words) or words[0] == "sweep":
        for name in {"runs/sweep-digits", *(word for word in words if "sweep-" in word)}:
            if not Path(name).exists():
                shutil.copytree(get("sweep"), name)
    if words[0] == "strip-state":
        save_file({"weight": torch.zeros(2, 2), "_fp4graph_q_ema_weight": torch.zeros(2, 2)}, words[1])
    if words[0] == "sweep":
        words = [re.sub(r"^\d+$", "1", word) for word in words]  # the study has few trials
    if words[0] in ("train", "compare") and "--list" not in words:
        words = [*words, *SMALL, *(("--seeds", "1") if words[0] == "compare" else ())]
        if "--statistics" in words:
            words[words.index("--statistics") + 1] = "1"
    run(*words)


def _make(words: list[str], get: Callable[[str], Any]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in words:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), f"Makefile has no target {target!r}"


def _python(words: list[str], get: Callable[[str], Any]) -> None:
    """Check that the module or the script that Python would run exists and has the given options."""
    if words[0] == "-m":
        module = importlib.import_module(words[1])
        if hasattr(module, "parser"):  # one of argparse
            module.parser().parse_args(words[2:])
        else:
            parse(module.app, words[2:])
        return
    _script(words, get)


def _script(words: list[str], get: Callable[[str], Any]) -> None:
    script = next(ROOT / word for word in words if word.endswith(".py"))
    assert script.exists(), f"{script} does not exist"
    source = script.read_text(encoding="utf-8")
    for word in words[words.index(str(script.relative_to(ROOT))) + 1 :]:
        if word.startswith("--"):
            option = word.removeprefix("--").partition("=")[0]
            spelled = (option, option.replace("-", "_"))
            assert any(spelling in source for spelling in spelled), f"{script.name} has no option --{option}"


def _pip(words: list[str], get: Callable[[str], Any]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in words:
        for extra in re.findall(r"\[(.*)\]", word):
            assert set(extra.split(",")) <= project["optional-dependencies"].keys()


def _nothing(words: list[str], get: Callable[[str], Any]) -> None:
    pass


#: How each program's commands are tested.
PROGRAMS: dict[str, Callable[[list[str], Callable[[str], Any]], None]] = {
    "fp4graph": _fp4graph,
    "make": _make,
    "python": _python,
    "torchrun": _script,
    "pip": _pip,
    "pytest": _nothing,  # in examples/technique_plugin; test_technique_plugin.py runs its tests
    "export": _nothing,
    "git": _nothing,
    "cd": _nothing,
}


@pytest.mark.long
@pytest.mark.parametrize("page", pages_with(*SHELL))
def test_commands_of_a_page(page, folder, request):
    """Commands run in order in one working directory, since a report shows what an earlier command trained."""
    for block in blocks(page):
        for program, *words in commands(block) if block.language in SHELL else []:
            assert program in PROGRAMS, f"{block}: say in PROGRAMS how {program!r} is tested"
            try:
                PROGRAMS[program](words, request.getfixturevalue)
            except Exception as error:
                error.add_note(f"{block}: {program} {' '.join(words)}")
                raise


def test_every_pattern_of_parsed_commands_matches_a_command():
    written = [" ".join(words) for block in of_language(*SHELL) for words in commands(block)]
    idle = [pattern for pattern in PARSED if not any(re.match(pattern, line) for line in written)]
    assert not idle, f"no page has a command like {idle}"


@pytest.mark.parametrize("block", of_language("toml"), ids=str)
def test_toml(block):
    tomllib.loads(block.text)


def test_every_language_is_tested():
    """Blocks without a language are output, or sketches."""
    known = {"", "python", "yaml", "toml", "mermaid", "text", *SHELL}
    assert {block.language for page in PAGES for block in blocks(page)} <= known
