"""The multiple-choice knapsack: one option for each item, at the least cost within limits, solved exactly by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fp4graph.lab.data.extras import needs

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Choice = np.ndarray[Any, np.dtype[np.int64]]
#: A bound Σᵢ use[i, option of i] <= most: ``use``, ``[items, options]``, and ``most``.
Limit = tuple[Floats, float]
#: The relative excess over a limit that rounding may cause when numbers are summed.
_ROUNDING = 1e-9


def total(table: Floats, choice: Choice) -> float:
    """Return Σᵢ table[i, option of i]."""
    return float(table[np.arange(len(choice)), choice].sum())


def within(limits: Sequence[Limit], choice: Choice) -> bool:
    """Return whether ``choice`` keeps all limits."""
    return all(total(use, choice) <= most + _ROUNDING * abs(most) for use, most in limits)


def solve(costs: Floats, allowed: Bools, limits: Sequence[Limit] = ()) -> Choice | None:
    """Return the option of each item for which the costs are least within ``limits``; None if nothing satisfies them.

    The variables are x[i, o] in {0, 1}::

        minimize  Σ costs·x   so that   Σₒ x[i, o] = 1,   Σ use·x <= most

    Args:
        costs: ``[items, options]``, finite where ``allowed``.
        allowed: ``[items, options]``, False where an item has no such option.
    """
    needs("scipy", "the search is solved by SciPy", "analysis")
    from scipy import optimize, sparse

    items, options = allowed.shape
    objective = np.where(allowed, costs, 0.0).ravel()
    rows = [np.where(allowed, use, 0.0).ravel() for use, _ in limits]
    sizes = [np.abs(row).max() or 1.0 for row in rows]
    stricter = np.array([most + _ROUNDING * abs(most) for _, most in limits])
    one_each = optimize.LinearConstraint(sparse.kron(sparse.eye(items), np.ones((1, options))), 1, 1)
    while True:
        bounds = zip(rows, sizes, stricter, strict=True)
        found = optimize.milp(
            objective * (1e3 / (np.abs(objective).max() or 1.0)),  # beside which HiGHS's gap of 1e-6 is nothing
            integrality=np.ones(items * options),
            bounds=optimize.Bounds(0, allowed.ravel().astype(float)),
            constraints=[one_each, *(optimize.LinearConstraint(row / s, -np.inf, most / s) for row, s, most in bounds)],
            options={"mip_rel_gap": 0.0},
        )
        if found.x is None:
            return None
        choice: Choice = found.x.reshape(items, options).argmax(1)
        if within(limits, choice):
            return choice
        # HiGHS keeps a bound to 1e-6 only; one that is exceeded is asked for more strictly.
        excess = np.array([total(use, choice) for use, _ in limits]) - stricter
        stricter = stricter - 2 * excess.clip(min=0)
