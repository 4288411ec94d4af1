"""A PostgreSQL server for the tests that sweep on one."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.helpers.commands import run
from tests.helpers.processes import PATIENCE

#: Fixtures whose tests are marked ``slow``.
SLOW = {"url", "compare", "result", "run", "page"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and SLOW.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Run ``fp4graph`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return run


def _programs():
    """The folder of PostgreSQL's programs; Debian's is on no PATH."""
    found = shutil.which("postgres")
    if found:
        return Path(found).resolve().parent
    return next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), None)


class Postgres:
    """A server in a folder of its own, reached by a socket there; root starts it as nobody, for it refuses root."""

    def __init__(self, programs, folder):
        self.programs, self.folder = programs, folder
        self.url = f"postgresql://sweep:secret@/postgres?host={folder}"
        self._user = "nobody" if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        if self._user:
            os.chown(folder, pwd.getpwnam(self._user).pw_uid, -1)
        self._run("initdb", "-D", str(folder / "data"), "-U", "sweep", "--auth=trust", "--no-sync").check_returncode()

    def _run(self, program, *arguments):
        return subprocess.run(
            [self.programs / program, *arguments], user=self._user, cwd=self.folder, capture_output=True, check=False
        )

    def start(self):
        command = ["postgres", "-D", "data", "-k", str(self.folder), "-c", "listen_addresses=", "-F"]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self.programs / command[0], *command[1:]], user=self._user, cwd=self.folder, stdout=log, stderr=log
            )
        deadline = time.monotonic() + PATIENCE
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._run("pg_isready", "-h", str(self.folder)).returncode == 0:
                return
            time.sleep(0.1)
        raise AssertionError(f"PostgreSQL did not start:\n{(self.folder / 'log').read_text()}")

    def stop(self):
        if self._process:
            self._process.send_signal(2)  # a fast shutdown: connections are closed
            self._process.wait(PATIENCE)
            self._process = None


@pytest.fixture(scope="session")
def postgres():
    programs = _programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed: neither on the PATH nor in /usr/lib/postgresql")
    folder = Path(tempfile.mkdtemp(prefix="sweep-"))  # not pytest's, which only root may enter
    server = Postgres(programs, folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)
