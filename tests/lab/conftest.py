"""A search space, the command line, and a PostgreSQL server for the tests that sweep on one."""

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from fp4graph.lab.sweeps.space import load_space
from tests.helpers.commands import run
from tests.helpers.processes import PATIENCE

#: Fixtures whose tests are marked ``slow``.
SLOW = {"url", "compare", "result", "run", "page"}


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and SLOW.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("slow")


@pytest.fixture(scope="session")
def table10():
    """Return the space of the design-space paper, from its Table 10."""
    return load_space("design-space")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Change to an empty folder, and return a function that runs ``fp4graph``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return run


class Postgres:
    """A server whose data and socket are in one folder. It refuses to run as root, so root starts it as nobody."""

    def __init__(self, programs, folder):
        self.programs, self.folder = programs, folder
        self.url = f"postgresql://sweep:secret@/postgres?host={folder}"
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user:
            os.chown(folder, pwd.getpwnam(self._user).pw_uid, -1)
        self._control("init", "-o", "-U sweep --auth=trust --no-sync")

    def _control(self, *words):
        command = [self.programs / "pg_ctl", "-D", "data", "-s", "-w", "-t", f"{PATIENCE:.0f}", *words]
        subprocess.run(command, user=self._user, cwd=self.folder, check=True)

    def start(self):
        self._control("start", "-l", "log", "-o", f"-k {self.folder} -c listen_addresses= -F")

    def stop(self):
        self._control("stop", "-m", "fast")  # connections are closed


@pytest.fixture(scope="session")
def postgres():
    debians = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))  # which is on no PATH
    found = shutil.which("postgres") or (debians and debians[-1])
    if not found:
        pytest.skip("PostgreSQL is not installed: neither on the PATH nor in /usr/lib/postgresql")
    folder = Path(tempfile.mkdtemp(prefix="sweep-"))  # nobody may not enter pytest's folders
    server = Postgres(Path(found).resolve().parent, folder)
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder)
