"""Shared fixtures: small real models and a clean compiler between tests; a report of slow tests without a marker."""

from __future__ import annotations

import gc
import getpass
import os
import shlex
import shutil
import sys
import tempfile
import zlib
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers import costs, models, training

# Inductor's cache does not tell ATEN_CPU_CAPABILITY apart: it would compile code that was generated for other vectors.
if capability := os.environ.get("ATEN_CPU_CAPABILITY"):
    folder = f"torchinductor_{getpass.getuser()}_{capability}"
    # Not by setdefault: torch set this variable when it was imported.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), folder)

# On Intel CPUs the order of MKL's fp32 sums depends on where operands lie in memory, unless this variable is set before
# the first product. Processes that tests start inherit it. On other CPUs the setting would choose slower code.
cpus = Path("/proc/cpuinfo")
if cpus.exists() and "GenuineIntel" in cpus.read_text():
    os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

costs.install()
#: The marker of the tests that request a fixture, by the fixture's name.
MARKED_BY_FIXTURE = {"inductor": "inductor", "postgres": "service"}
#: If a test has at least this many cases marked ``long`` or ``gpu``, continuous integration runs one in three of them,
#: and those marked ``long(every=True)``.
MANY = 3


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests whose fixtures or parameters show that they are slow, and cases that continuous integration leaves
    out."""
    for item in items:
        for fixture in getattr(item, "fixturenames", ()):
            if fixture in MARKED_BY_FIXTURE:
                item.add_marker(MARKED_BY_FIXTURE[fixture])
        call = getattr(item, "callspec", None)
        values = call.params.values() if call else ()
        for name, marker in (("inductor", "inductor"), ("postgresql", "service")):
            if any(isinstance(value, str) and value == name for value in values):
                item.add_marker(marker)
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        elsewhere = any(map(item.get_closest_marker, ("parity", "exhaustive")))
        every = any(marker.kwargs.get("every") for marker in item.iter_markers("long"))
        if any(map(item.get_closest_marker, ("long", "gpu"))) and not elsewhere and not every:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        if len(of_test) >= MANY:
            # A hash, the same on every machine, leaves out no value of a parameter because of its place.
            of_test.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
            for item in of_test[-(-len(of_test) // 3) :]:
                item.add_marker("exhaustive")


def pytest_collection_finish() -> None:
    """Exempt the objects that the imports made from garbage collection, and collect less often.

    Dynamo collects garbage at every capture, and would visit the hundreds of thousands of objects of torch and its
    companions each time: a fifth of the cost of capturing a small model. By default Python also collects after every
    700 new objects, which costs another tenth.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    # Before Dynamo measures new guards, for a log, it empties the processor's caches: 20 ms of each capture.
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[attr-defined]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Note the costs of a test that its markers do not declare."""
    with costs.noticing() as found:
        result = yield
    undeclared = found - {marker.name for marker in item.iter_markers()}
    if undeclared:  # xdist sends properties of a test to its controller
        item.user_properties.append(("undeclared", ", ".join(sorted(undeclared))))
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests that lack a marker by which `make check` would leave them out."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    undeclared = {
        report.nodeid: dict(getattr(report, "user_properties", ())).get("undeclared")
        for report in reports
        if getattr(report, "when", None) == "call"
    }
    for test, markers in undeclared.items():
        if markers:
            terminalreporter.write_line(f"mark it {markers}: {test}")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked ``compiler`` or requests the fixture ``inductor`` if there is no C++ compiler."""
    if item.get_closest_marker("compiler") or "inductor" in getattr(item, "fixturenames", ()):
        name = shlex.split(os.environ.get("CXX", "g++"))[0]
        if shutil.which(name) is None:
            pytest.skip(f"needs a C++ compiler, and there is no {name}: install g++, or name a compiler in CXX")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Seed each test, and drop the compiled code of other tests."""
    _forget_compiled()
    torch.manual_seed(0)
    yield
    _forget_compiled()


def _forget_compiled() -> None:
    """Reset Dynamo if it has traced any code. A reset costs little, but the next capture starts without caches."""
    frames = sys.modules.get("torch._dynamo.convert_frame")
    if frames is not None and frames.FRAME_COUNTER:
        torch._dynamo.reset()


@pytest.fixture
def vit() -> Callable[..., nn.Module]:
    """Make a two-block timm ViT of width 64 on 32x32 images, the same weights every time."""
    return models.vit


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def operation_by_operation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test's models uncompiled, unless its markers or parameters say that it tests compiled models."""
    call = getattr(request.node, "callspec", None)
    compiled = any(request.node.get_closest_marker(name) for name in ("captured", "inductor"))
    if compiled or (call and "aot_eager" in call.params.values()):
        yield
    else:
        with training.operation_by_operation():
            yield
