"""The database behind a study: SQLite, or another that SQLAlchemy supports, with errors that say what to do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, RDBStorage
from sqlalchemy import create_engine, inspect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.util import asbool

from fp4graph.errors import Error, install

#: Errors of a database that is busy or unreachable.
AWAY = (StorageInternalError, SQLAlchemyError)
#: Seconds for which a sweep repeats queries that a database does not answer.
ASK_AGAIN = 120.0
#: Engine settings by kind of database: the seconds to wait for another process's write, or for a server.
_SETTINGS: dict[str, dict[str, Any]] = {
    "sqlite": {"connect_args": {"timeout": 60}},
    "postgresql": {"pool_pre_ping": True, "connect_args": {"connect_timeout": 10}},
}


class Away(Error):
    """The database did not answer in time."""


class Storage(RDBStorage):
    """Optuna's storage, which repeats queries that a database does not answer for ``ask_again`` seconds.

    ``shown`` is the URL without the password, for messages.

    Raises:
        Error: the database cannot be reached; or ``existing`` is True, and it does not exist or has no studies. Nothing
            is written then.
    """

    def __init__(self, url: str, *, existing: bool = False) -> None:
        try:
            parsed = make_url(url)
        except (ArgumentError, ValueError) as error:
            raise Error(f"not a database URL ({error}); write sqlite:///FILE or postgresql://HOST/NAME") from None
        self.shown, kind = parsed.render_as_string(hide_password=True), parsed.get_backend_name()
        if parsed.drivername in ("postgres", "postgresql"):
            parsed, kind = parsed.set(drivername="postgresql+psycopg"), "postgresql"
        if kind == "sqlite" and (file := _file_of(parsed)) is not None:
            if not file.parent.is_dir():
                raise Error(f"{self.shown}: folder {str(file.parent)!r} does not exist; make it, or give another file")
            if existing and not file.is_file():  # connecting would make the file
                raise Error(f"{self.shown} does not exist; give the database of fp4graph sweep")
        text, settings = parsed.render_as_string(hide_password=False), _SETTINGS.get(kind, {"pool_pre_ping": True})
        try:
            engine = create_engine(text, **settings)
        except (ImportError, NoSuchModuleError) as error:
            raise Error(
                f"{self.shown}: Python has no driver for this database ({error}); {install('sweep')} for "
                "PostgreSQL, or the driver that the URL names"
            ) from None

        def connect() -> None:
            if existing and not inspect(engine).has_table("studies"):
                raise Error(f"{self.shown} holds no sweep: it is empty or of another program; give another database")
            RDBStorage.__init__(self, text, engine_kwargs=settings)

        self.ask_again = 1.0  # of two processes that make the tables of an empty database at once, one fails
        try:
            self.patiently(connect)
        except RuntimeError as error:  # the schema of another Optuna
            raise Error(f"{self.shown}: {error}") from None
        finally:
            engine.dispose()
        self.ask_again = ASK_AGAIN

    def patiently(self, action: Callable[[], Any]) -> Any:
        """Run ``action``, and repeat it for a while if the database is busy or unreachable."""
        deadline, delay = time.monotonic() + self.ask_again, 0.05
        while True:
            try:
                return action()
            except AWAY as error:
                if time.monotonic() > deadline:
                    cause = error.__cause__ if isinstance(error, StorageInternalError) and error.__cause__ else error
                    reason = str(getattr(cause, "orig", None) or cause).strip().splitlines()[0]  # the database's text
                    raise Away(
                        f"the database {self.shown} has not been usable for {self.ask_again:.0f} seconds: {reason}; "
                        "check that it exists and runs, that user and password are right, that you may write to it, "
                        "and that the disk has room. Recorded trials are kept; the same command resumes the sweep"
                    ) from error
                time.sleep(delay * (1 + random.random()))
                delay = min(2 * delay, 5.0)

    def record_heartbeat(self, trial_id: int) -> None:
        with suppress(*AWAY):  # an error would end Optuna's heartbeat thread; the next heartbeat may succeed
            super().record_heartbeat(trial_id)

    def begin_heartbeats(self, trial_id: int) -> None:
        """Record the first heartbeat of another worker's trial; raise :class:`Away` if the database does not answer."""
        self.patiently(lambda: super(Storage, self).record_heartbeat(trial_id))


def _file_of(url: URL) -> Path | None:
    """Return the file of an SQLite database, or None for a database in memory. With ``uri=true`` SQLAlchemy hands
    ``file:...`` to SQLite, which reads it as a URI."""
    name = url.database or ""
    if name.startswith("file:") and asbool(url.query.get("uri", False)):
        name = "" if url.query.get("mode") == "memory" else unquote(urlsplit(name).path).removeprefix(":memory:")
    return Path(name) if name else None


def _patient(name: str) -> Callable[..., Any]:
    method = getattr(RDBStorage, name)
    return lambda self, *args, **kwargs: self.patiently(lambda: method(self, *args, **kwargs))


for _name in (*BaseStorage.__abstractmethods__, "_get_trials", "_get_stale_trial_ids"):
    setattr(Storage, _name, _patient(_name))


def url_of(source: str | Path, *, existing: bool = False) -> str:
    """Return the URL of ``source``: a URL, an SQLite file, or a folder with a ``sweep.db``.

    Raises:
        Error: with ``existing``, the file does not exist; or SQLAlchemy has no URL for its path.
    """
    if "://" in str(source):
        return str(source)
    path = Path(source)
    path = path / "sweep.db" if path.is_dir() else path
    if existing and not path.is_file():
        raise Error(f"database {str(path)!r} does not exist; give a sweep's folder, its SQLite file, or a URL")
    url = URL.create("sqlite", database=str(path))
    text = url.render_as_string()  # escapes ? and % in the path, from SQLAlchemy 2.1 on
    if make_url(text) != url:
        raise Error(f"SQLAlchemy before 2.1 takes no '?' in the path {str(path)!r}; give another folder, or update it")
    return text


def sweeps(url: str) -> list[str]:
    """Return the names of the sweeps in a database; raise an Error if it cannot be reached or has no studies."""
    return [s.study_name for s in Storage(url, existing=True).get_all_studies() if "fp4graph" in s.user_attrs]
