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
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from fp4graph.errors import Error

#: Errors of a database that is busy or away.
AWAY = (StorageInternalError, SQLAlchemyError)


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
    shown = parsed.render_as_string(hide_password=True)
    if parsed.drivername in ("postgres", "postgresql"):
        parsed = parsed.set(drivername="postgresql+psycopg")
    if parsed.get_backend_name() == "sqlite" and parsed.database:
        folder = Path(parsed.database).parent
        if not folder.is_dir():
            raise Error(f"{shown}: there is no folder {str(folder)!r}; make it, or give another file")
    text = parsed.render_as_string(hide_password=False)
    for attempt in range(5):
        try:
            if existing and not _has_studies(text, parsed):
                raise Error(f"{shown} holds no sweep: it is a database of something else, or an empty one")
            return RDBStorage(text, engine_kwargs=_engine(parsed)), shown
        except (ImportError, NoSuchModuleError) as error:
            raise Error(
                f"{shown}: Python has no driver for this database ({error}); pip install 'fp4graph[sweep]' for "
                "PostgreSQL, or the driver that the URL names"
            ) from None
        except RuntimeError as error:  # the schema of another Optuna
            raise Error(f"{shown}: {error}") from None
        except AWAY as error:
            # Of two processes that find an empty database and make its tables, one fails.
            if attempt == 4:
                raise _unreachable(shown, error) from error
            time.sleep(0.2)
    raise AssertionError


def _has_studies(text: str, url: URL) -> bool:
    engine = create_engine(text, **_engine(url))
    try:
        return inspect(engine).has_table("studies")
    finally:
        engine.dispose()


def _engine(url: URL) -> dict[str, Any]:
    if url.get_backend_name() == "sqlite":
        return {"connect_args": {"timeout": 60}}  # seconds to wait while another process writes
    options: dict[str, Any] = {"pool_pre_ping": True}  # a server that was restarted in between is no error
    if url.get_backend_name() == "postgresql":
        options["connect_args"] = {"connect_timeout": 10}
    return options


@contextmanager
def answering(shown: str) -> Iterator[None]:
    try:
        yield
    except AWAY as error:
        raise _unreachable(shown, error) from error


def _unreachable(shown: str, error: Exception) -> Error:
    remedy = "see that it runs, that it exists, and that user and password are right"
    if shown.startswith("sqlite"):
        remedy = "see that it is an SQLite file, that you may write it and its folder, and that the disk has room"
    return Error(f"the database {shown} cannot be used: {reason(error)}; {remedy}")


def reason(error: BaseException) -> str:
    """Return the database's own message, without SQLAlchemy's additions."""
    cause = error
    while isinstance(cause, StorageInternalError) and cause.__cause__ is not None:
        cause = cause.__cause__
    return str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]


def sweeps(url: str) -> list[str]:
    """Return the names of the sweeps in a database.

    Raises:
        Error: it cannot be reached, or has no studies.
    """
    storage, shown = open_storage(url, existing=True)
    with answering(shown):
        return [study.study_name for study in storage.get_all_studies() if "fp4graph" in study.user_attrs]
