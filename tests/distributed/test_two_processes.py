"""The harness of two processes: outcomes of cases, also if a process ends before them."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.distributed.two_processes import launch
from tests.helpers.processes import write_whole

pytestmark = [pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"), pytest.mark.process]


@pytest.mark.long
def test_cases_that_a_rank_does_not_finish_say_how_the_rank_ended(tmp_path: Path) -> None:
    outcomes = launch("harness_cases", tmp_path)
    assert outcomes["agrees"] == ""
    assert "on rank 1" in outcomes["raises_on_rank_1"]
    assert "this is rank 1" in outcomes["raises_on_rank_1"]
    assert "on rank 0" not in outcomes["raises_on_rank_1"]
    for case in ("ends_rank_1", "is_not_reached"):
        assert "rank 1 ended with exit code 3" in outcomes[case]
        assert "out of memory, say" in outcomes[case]


def test_a_report_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tmp_path / "rank0.json"
    write_whole(report, "former")
    monkeypatch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(report, "latter")
    assert report.read_text() == "former"
