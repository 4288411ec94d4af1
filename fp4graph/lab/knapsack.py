"""The multiple-choice knapsack: one option for each item, at the least cost within limits, solved exactly by HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fp4graph.lab.data.extras import needs as requires

Floats = np.ndarray[Any, np.dtype[np.float64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Choice = np.ndarray[Any, np.dtype[np.int64]]
#: Costs are scaled to this size, beside which HiGHS's absolute gap of 1e-6 is nothing.
_SCALE = 1e3
#: The relative excess over a limit that rounding may cause when numbers are summed.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Limit:
    """The bound Σᵢ use[i, option of i] + Σₛ switch[s] <= most, over all items i and all switches s that are on.

    Attributes:
        use: ``[items, options]``.
        switch: ``[switches]``, what a switch uses however many items turn it on; None for nothing.
    """

    use: Floats
    most: float
    switch: Floats | None = None


@dataclass(frozen=True)
class Knapsack:
    """The options of each item, and how they depend on one another.

    Attributes:
        allowed: ``[items, options]``; False where an item has no such option.
        needs: ``[options, switches]``; True where an option turns a switch on. No switches by default.
        joined: options, each with items that all take it or all do not.
    """

    allowed: Bools
    needs: Bools = field(default_factory=lambda: np.zeros((0, 0), bool))
    joined: Sequence[tuple[int, Sequence[int]]] = ()

    def solve(self, costs: Floats, limits: Sequence[Limit] = (), switch_costs: Floats | None = None) -> Choice | None:
        """Return the option of each item for which the costs are least within ``limits``; None if nothing satisfies
        them.

        The variables are x[i, o] in {0, 1} for the options and z[s] in {0, 1} for the switches::

            minimize  Σ costs·x + switch_costs·z
            so that   Σₒ x[i, o] = 1,   Σᵢ x[i, o] <= items·z[s] where o needs s,   Σ use·x + switch·z <= most

        Args:
            costs: ``[items, options]``, finite where allowed.
        """
        requires("scipy", "the search is solved by SciPy", "analysis")
        from scipy import optimize, sparse

        (items, options), switches = self.allowed.shape, self.needs.shape[1]
        none = np.zeros(switches)

        def row(x: Floats, z: Floats | None = None) -> Floats:
            return np.concatenate([np.where(self.allowed, x, 0.0).ravel(), none if z is None else z])

        objective = row(costs, switch_costs)
        each = sparse.kron(sparse.eye(items), np.ones((1, options)))
        constraints = [optimize.LinearConstraint(sparse.hstack([each, sparse.csr_array((items, switches))]), 1, 1)]
        for option, switch in zip(*np.nonzero(self.needs), strict=True):
            turned_on = row(np.tile(np.eye(options)[option], (items, 1)), -items * np.eye(switches)[switch])
            constraints.append(optimize.LinearConstraint(turned_on, -np.inf, 0))
        for option, (first, *others) in self.joined:
            for other in others:
                pair = np.zeros((items, options))
                pair[first, option], pair[other, option] = 1, -1
                constraints.append(optimize.LinearConstraint(row(pair), 0, 0))
        rows = [row(limit.use, limit.switch) for limit in limits]
        most = [limit.most + _ROUNDING * abs(limit.most) for limit in limits]
        while True:
            bounds = [
                optimize.LinearConstraint(each / (size := np.abs(each).max() or 1.0), -np.inf, bound / size)
                for each, bound in zip(rows, most, strict=True)
            ]
            found = optimize.milp(
                objective * (_SCALE / (np.abs(objective).max() or 1.0)),
                integrality=np.ones(len(objective)),
                bounds=optimize.Bounds(0, row(np.ones((items, options)), np.ones(switches))),
                constraints=[*constraints, *bounds],
                options={"mip_rel_gap": 0.0},
            )
            if found.x is None:
                return None
            choice: Choice = found.x[: items * options].reshape(items, options).argmax(1)
            excess = [self.used(limit, choice) - bound for limit, bound in zip(limits, most, strict=True)]
            if max(excess, default=0.0) <= 0:
                return choice
            # HiGHS keeps a bound to 1e-6 only; one that is exceeded is asked for more strictly.
            most = [bound - 2 * max(over, 0.0) for bound, over in zip(most, excess, strict=True)]

    def used(self, limit: Limit, choice: Choice) -> float:
        """Return what ``choice`` uses of ``limit``."""
        total = limit.use[np.arange(len(choice)), choice].sum()
        if limit.switch is not None:
            total += limit.switch[self.needs[np.unique(choice)].any(0)].sum()
        return float(total)

    def least(self, limit: Limit, limits: Sequence[Limit] = ()) -> float | None:
        """Return the least possible use of ``limit`` within ``limits``; None if nothing satisfies these."""
        choice = self.solve(limit.use, limits, limit.switch)
        return None if choice is None else self.used(limit, choice)
