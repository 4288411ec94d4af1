"""Cases that end in every way that a case can; run on two processes by test_two_processes.py."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist


def case_agrees() -> None:
    number = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(number)
    assert number.item() == 3


def case_raises_on_rank_1() -> None:
    assert dist.get_rank() == 0, "this is rank 1"


def case_ends_rank_1() -> None:
    if dist.get_rank() == 1:
        print("out of memory, say", file=sys.stderr, flush=True)
        os._exit(3)


def case_is_not_reached() -> None:
    pass
