"""The database behind a study: SQLite, or another that SQLAlchemy supports, with errors that say what to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from optuna.exceptions import StorageInternalError
from optuna.storages import RDBStorage
from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from fp4graph.errors import Error

#: Errors of a database that is busy or away.
AWAY = (StorageInternalError, SQLAlchemyError)
#: Engine settings by kind of database: how long to wait for another's write, or for a server.
_SETTINGS: dict[str, dict[str, Any]] = {
    "sqlite": {"connect_args": {"timeout": 60}},
    "postgresql": {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}},
}


def url_of(source: str | Path, *, existing: bool = False) -> str:
    """Return the URL of ``source``: a URL, an SQLite file, or a folder with a ``sweep.db``.

    Raises:
        Error: it has to be ``existing``, and there is no such file.
    """
    if "://" in str(source):
        return str(source)
    path = Path(source)
    path = path / "sweep.db" if path.is_dir() else path
    if existing and not path.is_file():
        raise Error(f"there is no database {str(path)!r}; name a sweep's folder, its SQLite file, or a database's URL")
    return f"sqlite:///{path}"


def open_storage(url: str, *, existing: bool = False) -> tuple[RDBStorage, str]:
    """Open the storage of ``url``; return it with the URL that messages show, without the password.

    Raises:
        Error: the database cannot be reached; or it has to be ``existing`` and has no studies: nothing is written then.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as error:
        raise Error(f"not a database's URL ({error}); write sqlite:///FILE or postgresql://HOST/NAME") from None
    shown, kind = parsed.render_as_string(hide_password=True), parsed.get_backend_name()
    if parsed.drivername in ("postgres", "postgresql"):
        parsed, kind = parsed.set(drivername="postgresql+psycopg"), "postgresql"
    if kind == "sqlite" and parsed.database and not (folder := Path(parsed.database).parent).is_dir():
        raise Error(f"{shown}: there is no folder {str(folder)!r}; make it, or give another file")
    text, settings = parsed.render_as_string(hide_password=False), _SETTINGS.get(kind, {"pool_pre_ping": True})
    for attempt in range(5):  # of two processes that make the tables of an empty database, one fails
        with answering(shown):
            try:
                engine = create_engine(text, **settings)
                try:
                    if existing and not inspect(engine).has_table("studies"):
                        raise Error(f"{shown} holds no sweep: it is a database of something else, or an empty one")
                finally:
                    engine.dispose()
                return RDBStorage(text, engine_kwargs=settings), shown
            except (ImportError, NoSuchModuleError) as error:
                raise Error(
                    f"{shown}: Python has no driver for this database ({error}); pip install 'fp4graph[sweep]' for "
                    "PostgreSQL, or the driver that the URL names"
                ) from None
            except RuntimeError as error:  # the schema of another Optuna
                raise Error(f"{shown}: {error}") from None
            except AWAY:
                if attempt == 4:
                    raise
        time.sleep(0.2)
    raise AssertionError


@contextmanager
def answering(shown: str) -> Iterator[None]:
    """Turn errors of the database ``shown`` into ones with a remedy."""
    try:
        yield
    except AWAY as error:
        remedy = "see that it runs, that it exists, and that user and password are right"
        if shown.startswith("sqlite"):
            remedy = "see that it is an SQLite file, that you may write it and its folder, and that the disk has room"
        raise Error(f"the database {shown} cannot be used: {reason(error)}; {remedy}") from error


def reason(error: BaseException) -> str:
    """Return the database's own message, without SQLAlchemy's additions."""
    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
    return str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]


def sweeps(url: str) -> list[str]:
    """Return the names of the sweeps in a database; raise an Error if it cannot be reached, or has no studies."""
    storage, shown = open_storage(url, existing=True)
    with answering(shown):
        return [study.study_name for study in storage.get_all_studies() if "fp4graph" in study.user_attrs]
