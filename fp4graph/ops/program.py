"""Operand and GEMM programs: what a policy's specs and techniques come to, as pure functions of tensors.

A program is frozen data: equal specs and techniques make equal programs, which share one compiled function however
many sites use it. Nothing in a program knows its site; whatever differs from site to site (keys, weight state) comes
in as tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fp4graph.errors import PluginError
from fp4graph.numerics import noise, scaling
from fp4graph.numerics.blocking import Blocking
from fp4graph.numerics.noise import Noise
from fp4graph.numerics.quantize import round_elements
from fp4graph.numerics.spec import QuantSpec
from fp4graph.operands import Operand
from fp4graph.technique import StateEntry, Technique, overrides

#: Salts that keep the noise of transforms and techniques apart from the spec's own, which draws from the operand's key
#: as fake_quantize does. Stable: changing one changes every seeded run.
_PAIR = 2  # the i-th transform of a GEMM draws under salt 2 + i
_TECHNIQUE = 16  # the i-th technique of an operand draws under salt 16 + i


@dataclass(frozen=True)
class Quantization:
    """The parts of one operand's quantization, in the blocked layout, for techniques that need to see inside.

    Shapes: ``values``, ``ratio`` and ``codes`` alike; ``z`` and ``scale`` with the axes ``axes`` of size 1. All fp32.
    The dequantized operand is ``gamma · codes · S`` (``codes / s`` for an encode scale).
    """

    spec: QuantSpec
    blocking: Blocking
    axes: tuple[int, ...]
    values: Tensor
    z: Tensor
    scale: Tensor
    ratio: Tensor
    codes: Tensor
    gamma: Tensor | None

    def dequantized(self) -> Tensor:
        """γ⁻¹ times the dequantized operand: blocked layout, fp32."""
        return scaling.dequantize(self.codes, self.scale, self.spec)


@dataclass(frozen=True)
class Term:
    """One summand of an operand: ``values`` times a scalar ``multiplier`` that waits until after the GEMM (or None)."""

    values: Tensor
    multiplier: Tensor | None = None

    def product(self) -> Tensor:
        """The summand itself, in the dtype of ``values``."""
        return self.values if self.multiplier is None else (self.values * self.multiplier).to(self.values.dtype)


@dataclass(frozen=True)
class StateSlot:
    """A weight-state tensor that a program takes, by technique and entry name."""

    technique: str
    entry: StateEntry


@dataclass(frozen=True)
class OperandProgram:
    """One operand's quantizer: a spec with the techniques that act on it, in the policy's order.

    Called on ``x [..., K]``, blocks along the last axis; returns the operand's terms in ``dtype``, shape of ``x``.
    """

    spec: QuantSpec | None
    techniques: tuple[Technique, ...] = ()
    state: tuple[StateSlot, ...] = field(default=())

    @property
    def draws(self) -> bool:
        """Whether calling it needs a key."""
        return self.spec is not None and (self.spec.needs_key or any(t.draws for t in self.techniques))

    @property
    def from_fprop(self) -> bool:
        """Whether it requantizes the dequantized fprop operand."""
        return self.spec is not None and self.spec.source == "fprop"

    @property
    def from_master(self) -> bool:
        """Whether it quantizes from before autocast's cast."""
        return self.spec is not None and self.spec.from_master

    @property
    def has_gradient_factor(self) -> bool:
        """Whether a technique replaces the straight-through estimator."""
        return self.spec is not None and bool(self._at("gradient_factor"))

    def __call__(
        self, x: Tensor, key: Tensor | None = None, state: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> tuple[Term, ...]:
        if self.spec is None:
            return (Term(x),)
        residuals = []
        for technique in self._at("split"):
            x, residual = technique.split(x, -1)
            if residual is not None:
                residuals.append(Term(residual.to(x.dtype)))
        return (self._composed(x, key, state or {}), *residuals)

    def _composed(self, x: Tensor, key: Tensor | None, state: Mapping[str, Mapping[str, Tensor]]) -> Term:
        """The quantizer inside every technique that wraps it."""
        multiplier: list[Tensor | None] = []

        def quantize(part: Tensor) -> Tensor:
            quantization = self.quantize(part, key, state)
            values, gamma = quantization.dequantized(), quantization.gamma
            # A scalar γ is multiplied after the GEMM: FP4 code times scale is exact in bf16, times γ it is not.
            if gamma is not None and (gamma.numel() != 1 or wrapped):
                values, gamma = values * gamma, None
            multiplier[:] = [None if gamma is None else gamma.reshape(())]
            return quantization.blocking.join(values).to(part.dtype)

        wrapped = bool(self._at("around") or self._at("after"))
        inner: Callable[[Tensor], Tensor] = quantize
        for technique in self._at("around"):
            inner = _wrap(technique, inner)
        y = inner(x)
        for technique in self._at("after"):
            y = _checked(technique, technique.after(y, self._noise(technique, key, x)), y)
        return Term(y, multiplier[0] if multiplier else None)

    def quantize(self, x: Tensor, key: Tensor | None, state: Mapping[str, Mapping[str, Tensor]]) -> Quantization:
        """The bare quantizer, with its parts: statistic, γ, scale, ratio, codes."""
        spec = self.spec
        assert spec is not None, "a high-precision operand has no quantizer"
        blocking = Blocking(tuple(x.shape), spec.block)
        values = blocking.split(x.to(torch.float32))
        axes = blocking.axes
        z = scaling.amax(values, axes)
        for technique in self._at("statistic"):
            z = _checked(technique, technique.statistic(values, axes, z), z)
        gamma: Tensor | None = None
        for technique in self._at("normalizer"):
            factor = technique.normalizer(z, spec)
            if factor is not None:
                values, z = values / factor, z / factor
                gamma = factor if gamma is None else gamma * factor
        scale: Tensor | None = None
        for technique in self._at("scale"):
            chosen = technique.scale(z, spec, self._noise(technique, key, x))
            scale = scale if chosen is None else _checked(technique, chosen, z)
        if scale is None:
            scale = scaling.block_scale(z, spec.scale, spec.element, Noise(key, blocking, x.device))
        ratio = scaling.ratio(values, scale, spec)
        codes: Tensor | None = None
        for technique in self._at("round"):
            mine = {name: blocking.split(entry) for name, entry in state.get(technique.name, {}).items()}
            chosen = technique.round(ratio, scale, spec, self._noise(technique, key, x), mine)
            codes = codes if chosen is None else _checked(technique, chosen, ratio)
        if codes is None:
            codes = round_elements(ratio, spec, Noise(key, blocking, x.device))
        return Quantization(spec, blocking, axes, values, z, scale, ratio, codes, gamma)

    def gradient_factor(
        self, x: Tensor, key: Tensor | None, state: Mapping[str, Mapping[str, Tensor]]
    ) -> Tensor | None:
        """Diagonal of the quantizer's Jacobian at ``x`` by the techniques' surrogates, shape of ``x``; None is 1."""
        techniques = self._at("gradient_factor")
        if self.spec is None or not techniques:
            return None
        quantization = self.quantize(x, key, state)
        factor: Tensor | None = None
        for technique in techniques:
            mine = technique.gradient_factor(quantization)
            if mine is not None:
                factor = mine if factor is None else factor * mine
        return None if factor is None else quantization.blocking.join(factor)

    def _at(self, stage: str) -> list[Technique]:
        return [technique for technique in self.techniques if overrides(technique, stage)]

    def _noise(self, technique: Technique, key: Tensor | None, x: Tensor) -> Noise:
        assert self.spec is not None
        salt = _TECHNIQUE + self.techniques.index(technique)
        return Noise(_salted(key, salt), Blocking(tuple(x.shape), self.spec.block), x.device)


@dataclass(frozen=True)
class GemmProgram:
    """One GEMM ``left [..., I, K] @ right [..., J, K]ᵀ``: pair transforms, then each operand's quantizer.

    ``transforms`` act on both operands in order and cancel in the product.
    """

    left: OperandProgram
    right: OperandProgram
    transforms: tuple[Technique, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether calling it needs a key."""
        return self.left.draws or self.right.draws or any(t.draws for t in self.transforms)

    def rotate(self, left: Tensor, right: Tensor, key: Tensor | None) -> Rotation:
        """Both operands in the transforms' basis, with what it takes to come back."""
        contexts: list[tuple[Tensor, ...]] = []
        lengths: list[int | torch.SymInt] = []
        for index, transform in enumerate(self.transforms):
            salted = _salted(key, _PAIR + index)
            draw = Noise(salted, Blocking(tuple(left.shape), "tensor"), left.device)
            context = transform.pair_context(left, right, draw)
            contexts.append(context)
            lengths.append(left.shape[-1])
            left, right = transform.transform(left, "left", context), transform.transform(right, "right", context)
        return Rotation(left, right, self.transforms, tuple(contexts), tuple(lengths))


@dataclass(frozen=True)
class Rotation:
    """The operands of one GEMM after its pair transforms (contraction axis last, perhaps zero-padded by them)."""

    left: Tensor
    right: Tensor
    transforms: tuple[Technique, ...]
    contexts: tuple[tuple[Tensor, ...], ...]
    lengths: tuple[int | torch.SymInt, ...]

    def apply(self, x: Tensor, side: Literal["left", "right"]) -> Tensor:
        """A further tensor of the side's shape, into the transforms' basis."""
        for transform, context in zip(self.transforms, self.contexts, strict=True):
            x = transform.transform(x, side, context)
        return x

    def undo(self, x: Tensor, side: Literal["left", "right"]) -> Tensor:
        """Back to the original basis and length."""
        steps = zip(reversed(self.transforms), reversed(self.contexts), reversed(self.lengths), strict=True)
        for transform, context, length in steps:
            x = transform.inverse(x, side, context)[..., :length]
        return x


def multiply(left: tuple[Term, ...], right: tuple[Term, ...], bias: Tensor | None = None) -> Tensor:
    """``Σᵢⱼ leftᵢ @ rightⱼᵀ`` (+ bias ``[J]``), every pair of terms in a GEMM of its own, multipliers applied after.

    Computed in the terms' dtype (fp32 accumulation is the GEMM's own affair); the result has that dtype.
    """
    if len(left) == len(right) == 1 and left[0].multiplier is None and right[0].multiplier is None:
        a, b = left[0].values, right[0].values
        # The bias rides in the GEMM's epilogue, where hardware adds it before the one rounding to the output dtype.
        return torch.addmm(bias, a, b.mT) if bias is not None and a.dim() == 2 else _biased(a @ b.mT, bias)
    total: Tensor | None = None
    for a_term in left:
        for b_term in right:
            product = a_term.values @ b_term.values.mT
            for multiplier in (a_term.multiplier, b_term.multiplier):
                if multiplier is not None:
                    product = (product * multiplier).to(product.dtype)
            total = product if total is None else total + product
    assert total is not None
    return _biased(total, bias)


def total(terms: tuple[Term, ...]) -> Tensor:
    """The operand that ``terms`` stand for, as one tensor in their dtype."""
    result = terms[0].product()
    for term in terms[1:]:
        result = result + term.product()
    return result


def operand_key(key: Tensor | None, operand: Operand) -> Tensor | None:
    """The key of one of a site's six operands."""
    return _salted(key, 1 + list(Operand).index(operand))


def _salted(key: Tensor | None, salt: int) -> Tensor | None:
    return None if key is None else noise.derive(key, salt)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


def _wrap(technique: Technique, inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: _checked(technique, technique.around(inner, x), x)


def _checked(technique: Technique, result: Tensor, like: Tensor) -> Tensor:
    """``result``, or an error naming the plugin whose stage returned another shape than it was given."""
    if not isinstance(result, Tensor) or result.shape != like.shape:
        got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise PluginError(f"a stage returned {got} where shape {tuple(like.shape)} is due", plugin=technique.name)
    return result
