"""An interrupted run goes on bit for bit, in another process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.helpers.processes import python, run
from tests.helpers.steps import differences

pytestmark = [pytest.mark.process, pytest.mark.long]


@pytest.fixture(scope="module", params=["eager", pytest.param("inductor", marks=pytest.mark.compiler)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder with the files of a whole and of an interrupted run."""
    path = tmp_path_factory.mktemp(request.param)
    for part in ("whole", "rest"):
        run(python(Path(__file__).with_name("interrupted.py"), request.param, part, path))
    return path


@pytest.mark.parametrize("recipe", ["tetrajet", "tetrajet-qema", "tetrajet-qramping", "everything"])
def test_resumes_bit_for_bit(folder: Path, recipe: str) -> None:
    """Compare losses, weights, and the state of techniques, optimizer, schedule and scaler."""
    files = (folder / f"{recipe}.{kind}" for kind in ("end", "resumed", "checkpoint"))
    whole, resumed, half = (torch.load(file, weights_only=True) for file in files)
    assert len(whole["losses"]) == 6
    assert differences(whole, resumed) == []
    assert differences(whole["model"], half["model"])  # it went on
    remembered = [key for state in whole["optimizer"]["state"].values() for key in state if "fp4graph" in key]
    assert bool(remembered) == (recipe in ("tetrajet-qramping", "everything"))
