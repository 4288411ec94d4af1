"""Kernels quantizing one operand: to values, to values and bytes, and from bytes. CPUs and GPUs have all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from fp4graph.kernels import operators
from fp4graph.kernels.devices import Device
from fp4graph.kernels.direction import PackedOperand
from fp4graph.kernels.request import INSIDE, OUTSIDE, Asked, Job, Kernel, Layout, Needs, Quantizing, Request, Result


@dataclass(frozen=True)
class OfDevice(Kernel):
    """A kernel of one kind of device."""

    device: Device

    @property
    def kinds(self) -> Sequence[str]:
        """The kind of device that the kernel runs on."""
        return (self.device.kind,)

    @property
    def reads_whole(self) -> bool:
        """True on a GPU, where the maxima of blocks would be written only to find the tensor's maximum."""
        return self.device.kind == "cuda"

    def refuses_spec(self, request: Request) -> str | None:
        """Return why no kernel quantizes by the spec alone, or None. Techniques may act outside of the quantizer."""
        quantizing = request.quantizing
        if request.machine.lacks or (acting := quantizing.acting(*INSIDE)):
            return request.machine.lacks or acting
        if quantizing.shares is not None:
            return f"one scale is shared by a whole {quantizing.shares} of an expert"
        if quantizing.undrawn:
            return "random bits are missing"
        what = self.device.unknown(quantizing.spec)
        return None if what is None else f"no kernel knows {what}"

    def refuses_plain(self, request: Request) -> str | None:
        """Return why one kernel cannot be the whole quantizer, or None."""
        return request.machine.lacks or request.quantizing.acting(*OUTSIDE) or self.refuses_spec(request)

    def refuses_one_read(self, request: Request, quantizing: Quantizing) -> str | None:
        """Return why one kernel cannot quantize in one read, or None. Techniques may give one number for each block."""
        if self.refuses_plain(replace(request, quantizing=quantizing)) is None:
            return None
        if quantizing.stateful or quantizing.shares or quantizing.undrawn:
            return "scales depend on more than the tensor"
        if (acting := quantizing.acting(*OUTSIDE, "round", "rescale")) is not None:
            return acting
        if len(dict(quantizing.acts).get("group_scale", ())) > 1:
            return "several techniques divide by a scale of groups"
        what = self.device.unrounded(quantizing.spec)
        return request.machine.lacks or (None if what is None else f"no kernel knows {what}")


class Values(OfDevice):
    """One kernel that computes the scales and quantizes."""

    name: ClassVar[str] = "a kernel"
    place: ClassVar[int] = 20

    def refuses(self, request: Request) -> str | None:
        return self.refuses_plain(request)

    def run(self, job: Job) -> Result:
        return Result(operators.quantize(job.tensor, job.direction.spec, job.direction.draw, None, job.dtype))


class Within(Values):
    """The kernel of :class:`Values`, run whenever a technique around the quantizer calls the quantizer."""

    name: ClassVar[str] = "a kernel, within tensor code"
    place: ClassVar[int] = 21

    def refuses(self, request: Request) -> str | None:
        return self.refuses_spec(request)


class Given(OfDevice):
    """Tensor code that computes the scales, and a kernel that quantizes with them."""

    name: ClassVar[str] = "a kernel, scales by tensor code"
    place: ClassVar[int] = 22
    needs: ClassVar[Needs] = Needs.BLOCKS

    def refuses(self, request: Request) -> str | None:
        what = self.device.unrounded(request.quantizing.spec)
        unknown = None if what is None else f"no kernel knows {what}"
        stages = ("round",) if self.device.rescales else ("round", "rescale")
        return request.machine.lacks or unknown or request.quantizing.acting(*stages)

    def run(self, job: Job) -> Result:
        return Result(
            operators.quantize(job.tensor, job.direction.spec, job.direction.draw, job.direction.given, job.dtype)
        )


class Bytes(OfDevice):
    """One kernel that writes the quantized values, and bytes that stand for them."""

    name: ClassVar[str] = "a kernel that writes bytes too"
    asked: ClassVar[Sequence[Asked]] = (Asked.BYTES,)

    def refuses(self, request: Request) -> str | None:
        if request.transform is not None or request.layout is Layout.MOVED:
            return request.transformed or "tokens are copied to another layout"
        if (refused := self.refuses_plain(request) or self.device.unpacked(request.quantizing.spec)) is not None:
            return refused
        wrong = [dtype for dtype in (request.source, request.dtype) if dtype not in self.device.dtypes]
        return f"no bytes stand for {wrong[0]}" if wrong else None

    def run(self, job: Job) -> Result:
        assert job.dtype is not None
        values, packed = operators.quantize_and_pack(job.tensor, job.direction.spec, job.direction.draw, job.dtype)
        return Result(values, packed)


class FromBytes(OfDevice):
    """One kernel that reads bytes and quantizes the transpose of the operand that they stand for."""

    name: ClassVar[str] = "a kernel that reads bytes"
    asked: ClassVar[Sequence[Asked]] = (Asked.FROM_BYTES,)

    def refuses(self, request: Request) -> str | None:
        if request.transform is not None or request.observed:
            return request.transformed or "a technique observes the operand"
        return "tokens are copied to another layout" if request.layout is Layout.MOVED else self.refuses_plain(request)

    def run(self, job: Job) -> Result:
        assert isinstance(job.x, PackedOperand)
        return Result(job.x.requantized(job.direction.spec, job.direction.draw))


def quantizers(device: Device) -> tuple[Kernel, ...]:
    """Return the rows of one kind of device."""
    return Values(device), Within(device), Given(device), Bytes(device), FromBytes(device)
