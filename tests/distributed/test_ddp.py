"""DistributedDataParallel on two processes; each case is a function of ddp_cases.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fp4graph
from tests.distributed import ddp_cases
from tests.distributed.two_process_models import image_loss, vit
from tests.distributed.two_processes import cases, launch

pytestmark = [pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"), pytest.mark.process]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


#: Of training, noise, checkpoints and buffers; the others are `long`.
FEW = (
    "mixture_tetrajet_qema",
    "two_halves_have_the_gradients_of_the_whole",
    "ranks_draw_noise_of_their_own",
    "checkpoint_of_rank_0",
)
FURTHER = tuple(name for name in cases(ddp_cases) if name not in FEW)


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, str]:
    return launch("ddp_cases", folder, *FEW)


@pytest.fixture(scope="module")
def further(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return launch("ddp_cases", tmp_path_factory.mktemp("further"), *FURTHER)


@pytest.mark.parametrize("case", FEW)
def test_on_two_processes(outcomes: dict[str, str], case: str) -> None:
    if outcomes[case]:
        pytest.fail(outcomes[case], pytrace=False)


@pytest.mark.long
@pytest.mark.parametrize("case", FURTHER)
def test_further_cases_on_two_processes(further: dict[str, str], case: str) -> None:
    if further[case]:
        pytest.fail(further[case], pytrace=False)


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
