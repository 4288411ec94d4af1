"""DistributedDataParallel on two processes; each case is a function of ddp_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fp4graph
from tests.distributed import ddp_cases
from tests.distributed.two_process_models import image_loss, vit
from tests.distributed.two_processes import cases, launch

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.process,
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str]:
    return launch("ddp_cases", folder)


@pytest.mark.parametrize("case", cases(ddp_cases))
def test_on_two_processes(outcomes: dict[str, str], case: str) -> None:
    if outcomes[case]:
        pytest.fail(outcomes[case], pytrace=False)


def test_a_checkpoint_stores_no_rank_and_loads_in_one_process(outcomes: dict[str, str], folder: Path) -> None:
    assert outcomes["checkpoint_of_rank_0"] == ""
    saved = torch.load(folder / "ddp.pt", weights_only=True)
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    assert saved.keys() == model.state_dict().keys()
    model.load_state_dict(saved, strict=True)
    assert torch.equal(model.blocks[1].mlp.fc1._fp4graph_q_ema_weight, saved["blocks.1.mlp.fc1._fp4graph_q_ema_weight"])
    fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    image_loss(model, 0).backward()
    vit().load_state_dict(fp4graph.strip(saved), strict=True)
