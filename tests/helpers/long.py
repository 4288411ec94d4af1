"""Cases of tests that only ``make long`` runs."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest

from tests.helpers.policies import FEW

#: The marker of long cases that continuous integration runs, however many cases a test has.
LONG = pytest.mark.long(every=True)


def long_but(short: Container[str], names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test, those outside of ``short`` marked :data:`LONG`."""
    return [name if name in short else pytest.param(name, marks=LONG) for name in names]


def long_but_few(policies: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test, those outside of :data:`FEW` marked ``long``."""
    return [name if name in FEW else pytest.param(name, marks=pytest.mark.long) for name in policies]
