"""Estimates of the cost of quantization, for all sites from one forward and backward in high precision.

Both estimates are substitutes (:class:`fp4graph.graph.observe.Substitute`): they run every site exactly and quantized.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial

import torch
from torch import Tensor

from fp4graph import torch_internals
from fp4graph.errors import Error
from fp4graph.graph.observe import OfFactors
from fp4graph.ops.observe import ObservedOperand, observed
from fp4graph.ops.product import total
from fp4graph.technique.operands import Operand


class Noise:
    """Signal and noise of each operand: Σx² and Σ(Q(x) − x)² by site, summed over calls and batches."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, Operand], Tensor] = {}

    @torch.no_grad()
    def add(self, site: str, *gemm: ObservedOperand) -> None:
        """Add the operands of a GEMM of ``site``."""
        for seen in gemm:
            if seen.program.spec is not None:
                x, key = seen.x.double(), (site, seen.operand)
                sums = torch.stack([x.square().sum(), (total(seen.terms).double() - x).square().sum()])
                self._sums[key] = self._sums.get(key, 0) + sums

    def ratio(self, site: str, operand: Operand) -> float | None:
        """Return ‖Q(x) − x‖²/‖x‖²; None for an operand that was not multiplied or that is zero."""
        signal, noise = self._sums.get((site, operand), torch.zeros(2)).tolist()
        return noise / signal if signal else None


class _Estimate:
    """The sums of first and of second order of each site, over batches."""

    def __init__(self, noise: Noise, terms: int = 0) -> None:
        self._noise, self._terms = noise, terms
        self._first: defaultdict[str, float] = defaultdict(float)
        self._second: defaultdict[str, float] = defaultdict(float)

    def increase(self, site: str) -> float:
        """Return the estimate of a site."""
        return self._first[site] + self._terms * self._second[site]


class ForwardEstimate(_Estimate):
    """The loss increase of the fprop quantizers of each site to second order, summed over batches.

    With y a site's output, Δ = Q(A)Q(B)ᵀ − ABᵀ its error, and g = ∂L/∂y, all in the unquantized model::

        L(y + Δ) − L(y) ≈ Σ g·Δ + N/2 Σ_t (g_t·Δ_t)²

    where t are the rows of y (tokens) and N is the number of terms of the loss L, a mean. The second sum replaces the
    Hessian by the empirical Fisher matrix: if L = 1/N Σ_n l_n, and row t enters only one l_n, ∇²L ≈ 1/N Σ_n ∇l_n∇l_nᵀ
    with ∇l_n = N g_t (Martens 2020, "New insights and perspectives on the natural gradient method", sec. 11; BRECQ, Li
    et al. 2021, equation 10). Both matrices agree in expectation for the log-likelihood of a model that predicts well.
    """

    def __call__(self, site: str, a: Tensor, b: Tensor, quantized: OfFactors, exact: OfFactors) -> Tensor:
        y = exact(a, b)
        with torch.no_grad(), observed(partial(self._noise.add, site)):
            error = quantized(a, b).double() - y.double()
        if torch.is_grad_enabled():
            y = y if y.requires_grad else y.requires_grad_()
            y.register_hook(partial(self._add, site, error))  # type: ignore[no-untyped-call]
            return y.clone()  # the model may change its output in place, and a leaf must not be changed
        return y

    def _add(self, site: str, error: Tensor, gradient: Tensor) -> None:
        products = gradient.double() * error
        self._first[site] += products.sum().item()
        self._second[site] += products.sum(-1).square().sum().item() / 2


class BackwardEstimate(_Estimate):
    """The loss increase that the dgrad and wgrad quantizers of each site cause in one step of SGD, to first order.

    With e the error of the gradient with respect to a factor of the site (A in dgrad, B in wgrad), and δ the change of
    this factor by the exact step w ← w − ηg::

        L(w − ηg̃) − L(w − ηg) ≈ −η g·(g̃ − g) = Σ e·δ

    For a weight, δ = −ηg. For an activation A = A(w), an error e reaches the gradient of every weight before it as
    g̃ − g = Jᵀe with J = ∂A/∂w, so that −η g·Jᵀe = e·J(−ηg) = e·δ. One more forward, after the step, gives every δ.
    """

    def begin(self, *, stepped: bool = False) -> None:
        """Begin the forward of another batch; with ``stepped``, of the same batch after the step."""
        self._calls, self._stepped = Counter[str](), stepped
        self._ungraded: defaultdict[str, list[int]] = defaultdict(list)  # a reentrant checkpoint repeats these calls
        if not stepped:
            self._errors: dict[tuple[str, int], list[tuple[int, Tensor, Tensor]]] = {}

    def __call__(self, site: str, a: Tensor, b: Tensor, quantized: OfFactors, exact: OfFactors) -> Tensor:
        call, ungraded = (site, self._calls[site]), self._ungraded[site]
        self._calls[site] += 1
        if not torch.is_grad_enabled():
            ungraded.append(call[1])
        elif ungraded and torch_internals.backward_id() >= 0:
            call = site, ungraded[0]
        y = exact(a, b)
        if self._stepped:
            for place, error, before in self._errors.get(call, ()):
                self._first[site] += (error * ((a, b)[place].double() - before.double())).sum().item()
            return y
        # These leaves end the gradient at the site: one factor may depend on the other, as in a layer's second call.
        leaves = {id(x): x.detach().requires_grad_(y.requires_grad and x.requires_grad) for x in (a, b)}
        factors = leaves[id(a)], leaves[id(b)]  # the same leaf twice for y @ y, and its error once
        with observed(partial(self._noise.add, site)):
            outputs = exact(*factors), quantized(*factors)
        places = {id(x): place for place, x in enumerate(factors) if x.requires_grad}.values()
        kept = [(place, factors[place].detach().clone()) for place in places]  # the model may change a factor in place

        def add(gradient: Tensor) -> None:
            if call[1] in ungraded and ungraded[1:]:
                raise Error(
                    f"{site} runs {len(ungraded)} times in checkpoints with use_reentrant=True, and which of these a "
                    "backward repeats is unknown; use_reentrant=False, or no checkpoint, allows its estimate"
                )
            plain, noisy = (torch.autograd.grad(output, [factors[p] for p in places], gradient) for output in outputs)
            self._errors[call] = [
                (place, q.double() - g.double(), x) for (place, x), g, q in zip(kept, plain, noisy, strict=True)
            ]

        if y.requires_grad:
            y.register_hook(add)  # type: ignore[no-untyped-call]
        return y
