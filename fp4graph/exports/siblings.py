"""Siblings: matrices that servers fuse into one matrix with one tensor scale.

vLLM's loader of compressed-tensors takes the largest stored 1/γ of a fused matrix; loaders of ModelOpt's layout take
the largest γ. Neither rescales the blocks, so siblings with different tensor scales are served with wrong values.
Activations of siblings with different tensor scales are quantized wrongly too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp4graph.exports.weights import ExportError, Fp4Weight
from fp4graph.graph.siblings import SIBLINGS, layer_of
from fp4graph.numerics.formats import E4M3

_LISTED = 3  # the most groups in an error's text


@dataclass(frozen=True, eq=False)
class Sibling:
    """The tensor scales of one weight.

    Attributes:
        name: the last part of the name of the weight's module, such as ``q_proj``.
        gamma: γ of the weight: 0-d, or ``[E]`` for the weights of experts.
        needed: the least γ under which no block scale overflows, in the shape of ``gamma``; 0 for a zero weight.
        inputs: γ of the activations, 0-d; None if they have no γ, which is stored as 1.
        weight: a function that computes the weight.
    """

    name: str
    gamma: Tensor
    needed: Tensor
    inputs: Tensor | None
    weight: Callable[[], Fp4Weight]


@dataclass(frozen=True, eq=False)
class Group:
    """The quantized siblings of the module ``owner``."""

    owner: str
    siblings: tuple[Sibling, ...]

    @property
    def gammas(self) -> Tensor:
        """γ of each weight, ``[siblings, ...]``."""
        return _stacked([sibling.gamma for sibling in self.siblings])

    @property
    def input_gammas(self) -> Tensor:
        """γ of the activations of each weight, ``[siblings]``."""
        return _stacked([torch.ones(()) if s.inputs is None else s.inputs for s in self.siblings])

    @property
    def factor(self) -> float:
        """The largest quotient of two tensor scales; 1 if servers read the right scales."""
        return max(_factor(self.gammas), _factor(self.input_gammas))

    def __str__(self) -> str:
        scales = {"γ of": self.gammas, "γ of the activations of": self.input_gammas}
        parts = []
        for what, gammas in scales.items():
            if _factor(gammas) > 1:
                each = ", ".join(f"{s.name} {_text(gamma)}" for s, gamma in zip(self.siblings, gammas, strict=True))
                parts.append(f"{what} {each}, {_factor(gammas):.6g} times apart")
        return f"{self.owner}: {'; '.join(parts)}"

    def shared(self) -> Iterator[tuple[Fp4Weight, Tensor | None]]:
        """Yield each weight under a shared γ', the least under which no block scale overflows, and its activations' γ.

        Elements do not change. Block scales S become S·γ/γ', rounded to E4M3. The siblings share their activations,
        whose γ becomes the largest measured γ.
        """
        gamma = self.gammas.amax(0)
        if _factor(self.gammas) > 1:
            needed = _stacked([sibling.needed for sibling in self.siblings]).amax(0)
            gamma = torch.where(needed > 0, needed, gamma)
        measured = [sibling.inputs for sibling in self.siblings if sibling.inputs is not None]
        inputs = _stacked(measured).amax() if measured else None
        for sibling in self.siblings:
            weight = sibling.weight()
            ratio = (sibling.gamma.cpu() / gamma).to(weight.scales.device)
            scales = weight.scales * ratio.reshape(*ratio.shape, *([1] * (weight.scales.dim() - ratio.dim())))
            # ``needed`` leaves out blocks of zeros, whose scales may therefore exceed the maximum.
            scales = scales.clamp(max=E4M3.max).to(torch.float8_e4m3fn).to(torch.float32)
            yield replace(weight, scales=scales, multiplier=gamma.to(weight.multiplier.device)), inputs


class Siblings:
    """The tensor scales of the weights of one export, by the groups that servers fuse."""

    def __init__(self) -> None:
        self._families: dict[tuple[str, tuple[str, ...]], list[Sibling]] = {}

    def add(self, weight: Fp4Weight, inputs: Tensor | None) -> None:
        """Add the scales of ``weight`` and γ of its activations, if its name belongs to a family of siblings."""
        owner, _, name = layer_of(weight.name).rpartition(".")
        for family in SIBLINGS:
            if name in family:
                gamma = weight.multiplier
                blocks = weight.elements.reshape(*weight.scales.shape, -1).any(-1)
                largest = (weight.scales * blocks).flatten(gamma.dim()).amax(-1)
                sibling = Sibling(name, gamma, gamma * (largest / E4M3.max), inputs, weight.again)
                self._families.setdefault((owner or "(root)", family), []).append(sibling)

    def differing(self) -> list[Group]:
        """Return the groups whose members have different scales."""
        groups = (Group(owner, tuple(siblings)) for (owner, _), siblings in self._families.items())
        return [group for group in groups if group.factor > 1]


def require_shared(groups: Sequence[Group], remedy: str) -> None:
    """Raise an ExportError that lists ``groups`` with different tensor scales and the remedy, if there are any."""
    if not groups:
        return
    worst = sorted(groups, key=lambda group: -group.factor)
    more = f". {len(worst) - _LISTED} more groups differ" if len(worst) > _LISTED else ""
    weights = any(_factor(group.gammas) > 1 for group in groups)
    train = "Train with tensor_scaling: {share: siblings}, or give" if weights else "Give"
    raise ExportError(
        "cannot export siblings with different tensor scales: servers (vLLM, SGLang) fuse them and read one scale for "
        f"all, without rescaling blocks. {'. '.join(map(str, worst[:_LISTED]))}{more}. {train} {remedy}"
    )


def change(group: Group, shared: Sequence[tuple[Fp4Weight, Tensor | None]]) -> dict[str, Any]:
    """Return the scales of a group before and after sharing, and the relative errors of its weights, as plain data.

    An error is the Frobenius norm of the change of a weight over the norm of the weight in fprop.
    """
    squares, original = [], {}
    for sibling, input_gamma, (weight, _) in zip(group.siblings, group.input_gammas, shared, strict=True):
        w = sibling.weight().dequantized()
        squares.append(torch.stack([(weight.dequantized() - w).square().sum(), w.square().sum()]).cpu())
        scales = {"scale": sibling.gamma.tolist(), "input_scale": input_gamma.item()}
        original[sibling.name] = {**scales, "error": _error(squares[-1])}
    weight, inputs = shared[0]
    return {
        "module": group.owner,
        "scale": weight.multiplier.tolist(),
        "input_scale": 1.0 if inputs is None else inputs.item(),
        "error": _error(torch.stack(squares).sum(0)),
        "own": original,
    }


def _error(squares: Tensor) -> float:
    """Return the square root of the quotient of two sums; 0 for 0/0."""
    return (squares[0] / squares[1]).sqrt().nan_to_num(0.0).item()


def _stacked(gammas: Sequence[Tensor]) -> Tensor:
    """Return scales on the CPU, ``[siblings]``, or ``[siblings, E]`` if a sibling has a scale for each expert."""
    shape = max((gamma.shape for gamma in gammas), key=len)
    return torch.stack([gamma.cpu().expand(shape) for gamma in gammas])


def _factor(gammas: Tensor) -> float:
    return (gammas.amax(0) / gammas.amin(0)).amax().item()


def _text(gamma: Tensor) -> str:
    return f"{gamma:.4g}" if gamma.dim() == 0 else f"{gamma.amin():.4g} to {gamma.amax():.4g}"
