"""Tensor code, which takes every request that no hand-written kernel takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fp4graph.kernels.request import Job, Kernel, Needs, Request, Result


@dataclass(frozen=True)
class TensorCode(Kernel):
    """Runs the stages of techniques between the functions of :mod:`fp4graph.numerics`, and returns values only.

    If a request asks for bytes or columns too, they are quantized later, when they are needed.
    """

    name: ClassVar[str] = "tensor code"
    place: ClassVar[int] = 100
    needs: ClassVar[Needs] = Needs.STAGES

    def concerns(self, request: Request) -> bool:
        return True

    def refuses(self, request: Request) -> str | None:
        return None

    def run(self, job: Job) -> Result:
        assert job.rounded is not None
        return Result(job.rounded())


ROWS = (TensorCode(),)
