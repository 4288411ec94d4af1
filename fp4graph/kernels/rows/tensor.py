"""Tensor code: what takes every request that no kernel does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fp4graph.kernels.request import Job, Kernel, Needs, Request, Result


@dataclass(frozen=True)
class TensorCode(Kernel):
    """The stages of techniques between the functions of :mod:`fp4graph.numerics`, values alone.

    Asked for more, it leaves the rest to be quantized when it is needed.
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
