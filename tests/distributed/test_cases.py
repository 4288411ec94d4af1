"""DDP and FSDP2 on two processes; each case is a function of ddp_cases.py or fsdp_cases.py."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import fp4graph
from tests.distributed import ddp_cases, fsdp_cases
from tests.distributed.two_process_models import image_loss, vit
from tests.distributed.two_processes import cases, launch

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.process,
    pytest.mark.long,
]
FILES = {"ddp_cases": ddp_cases, "fsdp_cases": fsdp_cases}


@pytest.fixture(scope="module")
def launched(tmp_path_factory):

    @cache
    def run(file: str) -> tuple[dict[str, str], Path]:
        folder = tmp_path_factory.mktemp(file)
        return launch(file, folder), folder

    return run


@pytest.mark.parametrize(("file", "case"), [(file, case) for file, module in FILES.items() for case in cases(module)])
def test_on_two_processes(launched, file: str, case: str) -> None:
    outcomes, _ = launched(file)
    if outcomes[case]:
        pytest.fail(outcomes[case], pytrace=False)


@pytest.mark.parametrize("file", FILES)
def test_a_checkpoint_stores_no_rank_and_loads_in_one_process(launched, file: str) -> None:
    outcomes, folder = launched(file)
    assert outcomes["checkpoint"] == ""
    saved = torch.load(folder / "whole.pt", weights_only=True)
    model = fp4graph.apply(vit(), "tetrajet-qema", backend="eager")
    assert saved.keys() == model.state_dict().keys()
    model.load_state_dict(saved, strict=True)
    assert torch.equal(model.blocks[1].mlp.fc1._fp4graph_q_ema_weight, saved["blocks.1.mlp.fc1._fp4graph_q_ema_weight"])
    fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    image_loss(model, 0).backward()
    vit().load_state_dict(fp4graph.strip(saved), strict=True)
