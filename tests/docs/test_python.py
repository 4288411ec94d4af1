"""Python blocks of the README and the pages run, a page in one namespace; policies and search spaces load."""

from __future__ import annotations

import re
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

import fp4graph
from fp4graph.lab.sweeps.space import load_space
from fp4graph.technique.registry import Registry
from tests.docs.blocks import ROOT, Block, blocks, of_language, pages_with
from tests.helpers import models
from tests.helpers.steps import descend
from tests.lab import test_search

pytestmark = pytest.mark.slow

#: By page, text of its blocks that stands for something of the reader's or takes long, and what runs instead.
INSTEAD: dict[str, dict[str, str]] = {
    "docs/sensitivity.md": {'by=("site", "gemm")': 'by="gemm"'},
    "docs/diagnose.md": {"every=50": "every=2", "train(model, optimizer)": "train(model, optimizer, 12)"},
    "docs/compare.md": {
        "policy, seed=seed)": 'policy, seed=seed, backend="eager")',
        "seeds=3": "seeds=1, timing=False",
    },
    "docs/distributed.md": {'distributed.init_process_group("gloo")': "pass"},  # the test has made a group
    "docs/tasks.md": {"steps=200": "steps=2, device='cpu'"},
    "docs/how_to/trainer.md": {
        'FP4GraphCallback("tetrajet-qema")': 'FP4GraphCallback("tetrajet-qema", backend="eager")',
        'optimizer, "tetrajet-qema")': 'optimizer, "tetrajet-qema", backend="eager")',
    },
}


def _images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 50) -> list[float]:
    return descend(lambda: model(_images()).square().mean(), optimizer, steps)


# ------------------------------------------------------------------ names that each page assumes


def _first_steps(folder: Path) -> dict[str, Any]:
    from fp4graph.training import checkpoint

    model = fp4graph.apply(nn.Linear(32, 32), "mxfp4")
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters()), "checkpoint": checkpoint, "step": 7}


def _analysis(folder: Path) -> dict[str, Any]:
    import rich

    model = fp4graph.apply(models.vit(), "tetrajet", backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return {"model": model, "optimizer": optimizer, "train": _train, "rich": rich, "make_model": models.vit}


def _diagnose(folder: Path) -> dict[str, Any]:
    return {**_analysis(folder), "bf16_losses": [1.0] * 12}


def _clients(folder: Path) -> dict[str, Any]:
    model = models.vit()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def _distributed(folder: Path) -> dict[str, Any]:
    """A group of one process."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=0, world_size=1)
    return {"model": models.vit()}


def _search(folder: Path) -> dict[str, Any]:
    return {"model": test_search.model_of(), "loss": test_search.loss, "batches": test_search.batches(1)}


def _training(folder: Path) -> dict[str, Any]:
    """A LLaMA and what its training loop needs."""
    pytest.importorskip("transformers")
    model = fp4graph.apply(models.llama(), "tetrajet")
    schedule = types.SimpleNamespace(state_dict=dict, load_state_dict=lambda state: None)  # all that checkpoints call
    return {
        "steps": 2, "scheduler": schedule, "model": model, "optimizer": torch.optim.AdamW(model.parameters()),
        "x": torch.arange(16)[None], "y": None, "criterion": lambda output, _: output.logits.square().mean(),
    }  # fmt: skip


#: Pages whose blocks are alternatives: each block begins with new values of the names that the page assumes.
ALTERNATIVES = {"docs/distributed.md", "docs/training.md"}
#: Packages of extras that a page may import; without one of them the page is skipped.
OPTIONAL = {"accelerate", "datasets", "lightning", "peft", "timm", "torchao", "transformers", "trl"}
GIVEN = {
    "docs/first_steps.md": _first_steps,
    "docs/analysis.md": _analysis,
    "docs/diagnose.md": _diagnose,
    "docs/clients.md": _clients,
    "docs/distributed.md": _distributed,
    "docs/search.md": _search,
    "docs/training.md": _training,
}


@pytest.fixture
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fp4graph, "apply", partial(fp4graph.apply, backend="eager"))  # nothing on a page is compiled
    yield tmp_path
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _run(block: Block, text: str, namespace: dict[str, Any]) -> None:
    """Run a block in such a way that a traceback names the line of the page."""
    code = compile("\n" * (block.line - 1) + text, str(ROOT / block.page), "exec")
    exec(code, namespace)


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_of_a_page(page, working_directory):
    """Blocks run in order; a block that defines a technique runs as a module of its own."""
    instead = dict(INSTEAD.get(page, {}))
    namespace = {"torch": torch, "nn": nn, "fp4graph": fp4graph}
    namespace |= GIVEN[page](working_directory) if page in GIVEN else {}
    for block in blocks(page):
        if block.language != "python":
            continue
        for package in OPTIONAL.intersection(re.findall(r"^(?:import|from) (\w+)", block.text, re.MULTILINE)):
            pytest.importorskip(package)
        if page in ALTERNATIVES:
            namespace |= GIVEN[page](working_directory)
        text = block.text
        for old in [old for old in instead if old in text]:
            text = text.replace(old, instead.pop(old))
        if "@fp4graph.hookimpl" in text:
            _module(block)
        else:
            _run(block, text, namespace)
    assert not instead, f"{page} no longer contains {list(instead)}"


def _module(block: Block) -> types.ModuleType:
    """Run a block as the file of a plugin."""
    module = types.ModuleType("written_in_" + Path(block.page).stem)
    sys.modules[module.__name__] = module  # pydantic looks types up there
    try:
        _run(block, block.text, vars(module))
    finally:
        del sys.modules[module.__name__]
    return module


@pytest.mark.parametrize("page", ["README.md", "docs/techniques.md"])
def test_the_technique_of_a_page_changes_an_output(page):
    plugin = next(block for block in blocks(page) if "@fp4graph.hookimpl" in block.text)
    registry, outputs = Registry([("plugin", _module(plugin))]), []
    for techniques in ([], ["headroom"]):
        torch.manual_seed(0)
        model, data = models.vit(), {"version": 1, "name": "p", "extends": "tetrajet", "techniques": techniques}
        model = fp4graph.apply(model.eval(), fp4graph.load_policy(data, registry), backend="eager")
        outputs.append(model(torch.randn(1, 3, 32, 32)))
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("block", of_language("yaml"), ids=str)
def test_policies_and_spaces(block, tmp_path):
    """A policy loads, with the techniques of the tutorial, or fails at the line and with the words of its comment
    ``# error:``; a search space loads."""
    file = tmp_path / "block.yaml"
    file.write_text(block.text, encoding="utf-8")
    if "\nparameters:" in block.text:
        assert load_space(str(file)).size() > 1
        return
    if refusal := re.search(r"# error: (.*)", block.text):
        with pytest.raises(fp4graph.PolicyError, match=re.escape(refusal[1])) as caught:
            fp4graph.load_policy(file)
        assert caught.value.line == block.text[: refusal.start()].count("\n") + 1
        return
    plugins = [b for b in blocks("docs/first_technique.md") if "@fp4graph.hookimpl" in b.text]
    policy = fp4graph.load_policy(file, Registry([(str(b), _module(b)) for b in plugins]))
    assert any(rule.quantizes for rule in policy.rules)
