"""The kernels of a CPU (:mod:`fp4graph.kernels.cpu`): for dense operands, and for operands of experts.

On a CPU there is no kernel for both directions in one read: the second read takes only a sixth of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from fp4graph.kernels import experts
from fp4graph.kernels.devices import CPU
from fp4graph.kernels.direction import PackedOperand
from fp4graph.kernels.quantizers import OfDevice, quantizers
from fp4graph.kernels.request import Asked, Job, Request, Result


class OfExperts(OfDevice):
    """A kernel for the operands of experts."""

    def refuses_operand(self, request: Request, *dtypes: torch.dtype) -> str | None:
        """Return why no kernel of experts takes the operand, which is read and written in ``dtypes``, or None."""
        if request.observed:
            return "other code needs the whole operand"
        wrong = [dtype for dtype in dtypes if dtype not in self.device.dtypes]
        return f"no kernel of experts takes {wrong[0]}" if wrong else None

    @staticmethod
    def refuses_rotation(request: Request) -> str | None:
        """Return why a kernel cannot rotate the operand before it quantizes the blocks, or None."""
        block = request.quantizing.spec.block
        turned = request.rotation is not None and isinstance(block, int) and block % request.rotation == 0
        return None if turned and request.source is not None else request.transformed or "nothing rotates the operands"


class Places(OfExperts):
    """Quantizes tokens for wgrad while it moves them to their places."""

    name: ClassVar[str] = "a kernel that reads tokens where they lie"
    asked: ClassVar[Sequence[Asked]] = (Asked.PLACES,)

    def refuses(self, request: Request) -> str | None:
        read = request.dtype if request.source is None else request.source
        return request.transformed or self.refuses_operand(request, read) or self.refuses_plain(request)

    def run(self, job: Job) -> Result:
        assert job.places is not None
        assert job.dtype is not None
        return Result(experts.quantize_at(job.x, job.places, job.direction, job.dtype))


class TurnedPlaces(Places):
    """Like :class:`Places`, but also rotates the tokens."""

    place: ClassVar[int] = 49
    name: ClassVar[str] = "a kernel that reads tokens where they lie, and rotates them"
    turns: ClassVar[bool] = True

    def refuses(self, request: Request) -> str | None:
        return self.refuses_rotation(request) or super().refuses(replace(request, transform=None))


class Product(OfExperts):
    """Quantizes the weights of one expert after another, and multiplies with each weight while it is in the cache."""

    name: ClassVar[str] = "within the product, expert by expert"
    asked: ClassVar[Sequence[Asked]] = (Asked.VALUES, Asked.BYTES, Asked.FROM_BYTES)
    product: ClassVar[bool] = True

    def refuses(self, request: Request) -> str | None:
        dtypes = request.source or request.dtype, request.dtype
        if (refused := request.residual or self.refuses_operand(request, *dtypes)) is not None:
            return refused
        plain = self.refuses_plain(request)
        if request.asked is Asked.VALUES:
            return plain and self.refuses_one_read(request, request.quantizing)
        if request.transform is not None or plain is not None:
            return request.transformed or plain
        if request.asked is Asked.FROM_BYTES:
            return None
        if request.source is not request.dtype:
            return "the weights are cast"
        return self.device.unpacked(request.quantizing.spec)

    def run(self, job: Job) -> Result:
        assert job.left is not None
        assert job.groups is not None
        if isinstance(job.x, PackedOperand):
            return Result(experts.requantized_product(job.left, job.x, job.groups, job.direction))
        return Result(*experts.quantized_product(job.left, job.x, job.groups, job.direction, job.keeps))


class TurnedProduct(Product):
    """Like :class:`Product`, but rotates the weights before it quantizes them."""

    name: ClassVar[str] = "within the product, expert by expert, rotated there"
    asked: ClassVar[Sequence[Asked]] = (Asked.VALUES,)
    place: ClassVar[int] = 49
    turns: ClassVar[bool] = True

    def refuses(self, request: Request) -> str | None:
        return self.refuses_rotation(request) or super().refuses(request) or self.refuses_plain(request)


ROWS = (*quantizers(CPU), TurnedPlaces(CPU), Places(CPU), TurnedProduct(CPU), Product(CPU))
