"""Models and other objects that the command line names."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import Any

from fp4graph.errors import Error
from fp4graph.text import suggest


def imported(text: str) -> Any:
    """Return the object that ``pkg.module:name`` names; the current folder is searched first.

    Raises:
        Error: the text has another form, the module is missing or raises, or it has no such name.
    """
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))) or module.endswith(".py"):
        raise Error(f"{text!r} names no object; write package.module:name, such as mycode.train:run, without .py")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise Error(
                f"{text!r}: there is no module {error.name!r} in {folder} or among the installed packages; run the "
                "command in the folder that holds it, or put that folder on PYTHONPATH"
            ) from None
        raise Error(f"{text!r}: importing {module} raised {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, name.split("."), loaded)
    except AttributeError:
        known = [each for each in vars(loaded) if not each.startswith("_")]
        raise Error(f"{module} ({loaded.__file__}) has no {name!r}; {suggest(name, known)[:400]}") from None
