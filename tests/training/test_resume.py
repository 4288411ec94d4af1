"""An interrupted run goes on bit for bit, in another process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import python, run

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("interrupted.py")


@pytest.fixture(
    scope="module", params=["eager", pytest.param("inductor", marks=[pytest.mark.compiler, pytest.mark.long])]
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a whole run and an interrupted one left."""
    path = tmp_path_factory.mktemp(request.param)
    for part in ("whole", "rest"):
        run(python(WORKER, request.param, part, path))
    return path


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Paths at which two nested states are not the same, bit for bit."""
    if isinstance(a, torch.Tensor):
        same = isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
        return [] if same else [where]
    if isinstance(a, dict):
        if a.keys() != b.keys():
            return [f"{where}: {sorted(map(str, a.keys() ^ b.keys()))}"]
        return [path for key in a for path in differences(a[key], b[key], f"{where}/{key}")]
    if isinstance(a, list | tuple):
        return [path for i, pair in enumerate(zip(a, b, strict=True)) for path in differences(*pair, f"{where}/{i}")]
    return [] if a == b else [f"{where}: {a} and {b}"]


@pytest.mark.parametrize("recipe", ["tetrajet", "tetrajet-qema", "tetrajet-qramping", "everything"])
def test_resumes_bit_for_bit(folder: Path, recipe: str) -> None:
    """Losses, weights, the state of techniques, optimizer, schedule and scaler."""
    whole, resumed, half = (
        torch.load(folder / f"{recipe}.{kind}", weights_only=True) for kind in ("end", "resumed", "checkpoint")
    )
    assert len(whole["losses"]) == 6
    assert differences(whole, resumed) == []
    assert differences(whole["model"], half["model"])  # it went on
    remembered = [key for state in whole["optimizer"]["state"].values() for key in state if "fp4graph" in key]
    assert bool(remembered) == (recipe in ("tetrajet-qramping", "everything"))
