"""Imports the scripts behind the findings, which import each other from their folder."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest

from tests.helpers.processes import ROOT


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a script of ``examples/findings`` anew."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "findings"))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)
