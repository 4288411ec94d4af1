"""The registry of plugins: the offers that it accepts, and broken plugins, which do not affect others."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from fractions import Fraction
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from fp4graph.errors import PluginError, PolicyError, suggest
from fp4graph.numerics.formats import E2M1, ELEMENTS, ElementFormat, ScaleFormat
from fp4graph.policy import load_policy
from fp4graph.technique import Factors, Overhead, ProductOperation, hookspecs, registry
from fp4graph.technique.hookspecs import hookimpl
from fp4graph.technique.registry import GROUP, Registry
from tests.helpers.processes import ROOT, python, run
from tests.helpers.techniques import offering, technique


def hooks(**named: Callable[..., Any]) -> object:
    """Return a plugin object with these hooks."""
    return type("Plugin", (), {f"fp4graph_{name}": hookimpl(hook) for name, hook in named.items()})()


def registry_of(*plugins: tuple[str, object]) -> Registry:
    """Return a registry of these named plugins alone, without entry points."""
    return Registry(plugins, entry_point_group=None)


USES_T = {"version": 1, "default": {}, "techniques": ["t"]}


def raises(self: object) -> None:
    raise RuntimeError("out of order")


def wrong_signature(self: object, model: object) -> None: ...


OF_NO_TYPE = {"name": ClassVar[str], "overhead": ClassVar[Overhead], "option": "Nowhere"}
ODD = ElementFormat("odd", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
#: Broken plugins, with a part of the message.
BROKEN = {
    "signature": (hooks(techniques=wrong_signature), "model"),
    "unknown hook": (hooks(techniqes=lambda self: []), "fp4graph_techniqes"),
    # Registering stops at the second mistake, when the first is already pending.
    "two mistakes": (hooks(aardvark=lambda self: None, techniques=wrong_signature), "model"),
    "raises": (hooks(techniques=raises), "RuntimeError: out of order"),
    "not a technique": (offering(techniques=[int]), "<class 'int'> is not a subclass of fp4graph.Technique"),
    "an instance": (offering(techniques=[technique("t")()]), "is not a subclass of fp4graph.Technique"),
    "no overhead": (offering(techniques=[technique("t", overhead=None)]), "Made must declare overhead"),
    "no name": (offering(techniques=[technique("t", name=None)]), "Made must declare name"),
    "no complexity": (offering(techniques=[technique("t", complexity=None)]), "Made must declare complexity"),
    "an option of no type": (offering(techniques=[technique("t", __annotations__=OF_NO_TYPE)]), "Nowhere"),
    "two of one name": (offering(techniques=[technique("t"), technique("t")]), "technique 't' is already offered"),
    "half right": (offering(techniques=[technique("t"), int]), "is not a subclass"),
    "not iterable": (offering(techniques=3), "TypeError"),
    "not a format": (offering(formats=["e2m1"]), "'e2m1' is neither an ElementFormat nor a ScaleFormat"),
    "a taken format": (offering(formats=[E2M1]), "format 'e2m1' already exists"),
    "format after technique": (offering(techniques=[technique("t")], formats=[E2M1]), "format 'e2m1' already exists"),
    "a missing policy": (offering(policies=["/nowhere/p.yaml"]), "policy file '/nowhere/p.yaml' does not exist"),
    "not a product": (offering(products=[int]), "<class 'int'> is not a ProductOperation"),
    "no operator": (offering(products=[ProductOperation("mm", Factors)]), "'mm' is not of the form 'library::name'"),
    "a taken policy": (offering(policies=[ROOT / "policies/bf16.yaml"]), "'bf16' is already shipped"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("first", [True, False])
def test_a_broken_plugin_is_named_and_the_others_stay_usable(case: str, first: bool) -> None:
    plugin, message = BROKEN[case]
    healthy = ("healthy", offering(techniques=[technique("fine")], formats=[ODD]))
    plugins = [("broken", plugin), healthy] if first else [healthy, ("broken", plugin)]
    registered = registry_of(*plugins)
    assert list(registered.techniques) == ["fine"]
    assert registered.elements == {**ELEMENTS, "odd": ODD}
    assert list(registered.failures) == ["broken"]
    error = registered.failures["broken"]
    assert error.plugin == "broken"
    assert str(error).startswith("plugin 'broken': ")
    assert message in str(error)


@pytest.mark.parametrize("case", ["raises", "format after technique", "half right", "unknown hook"])
def test_the_error_of_an_unknown_technique_names_the_broken_plugin_that_may_have_it(case: str) -> None:
    registered = registry_of(("broken", BROKEN[case][0]), ("other", offering(formats=[E2M1])))
    with pytest.raises(PolicyError, match=r"unknown technique 't' \(plugin 'broken': .*\); known: none") as caught:
        load_policy(USES_T, registered)
    assert BROKEN[case][1] in str(caught.value)
    assert "other" not in str(caught.value)  # which has no hook for techniques


def test_the_error_of_an_unknown_format_names_the_broken_plugin_that_has_it() -> None:
    registered = registry_of(("broken", offering(formats=[ODD, E2M1])))
    with pytest.raises(PolicyError, match=r"unknown element format 'odd' \(plugin 'broken': .*'e2m1' already exists\)"):
        load_policy({"version": 1, "default": {"element": "odd"}}, registered)
    with pytest.raises(PolicyError, match="unknown element format 'even'; "):  # no plugin offers it
        load_policy({"version": 1, "default": {"element": "even"}}, registered)
    with pytest.raises(PolicyError, match=r"no policy 'odd' is shipped \(plugin 'broken': .*\), and it is not a file"):
        load_policy("odd", registered)


def weighing(complexity: Callable[..., Any]) -> Registry:
    """Return a registry with a technique ``t`` of this complexity weight."""
    return registry_of(("odd", offering(techniques=[technique("t", complexity=property(complexity))])))


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, "1", None, True, 10**400, 1.7e308])
def test_a_complexity_weight_that_omega_cannot_add_is_refused(weight: object) -> None:
    with pytest.raises(PluginError, match="plugin 'odd': technique 't': complexity must be a number from 0") as caught:
        load_policy(USES_T, weighing(lambda self: weight))
    assert caught.value.plugin == "odd"


@pytest.mark.filterwarnings("ignore:.*has no effect here")
def test_a_complexity_weight_may_be_any_real_number_and_an_exception_in_it_is_named() -> None:
    for weight in (Fraction(1, 2), np.float32(0.5)):
        assert load_policy(USES_T, weighing(lambda self, weight=weight: weight)).complexity == 0.5
    with pytest.raises(PluginError, match="plugin 'odd': technique 't': complexity: ZeroDivisionError"):
        load_policy(USES_T, weighing(lambda self: 1 / 0))


def test_offers_have_their_plugin_as_origin_and_do_not_leak_into_another_registry() -> None:
    scale = ScaleFormat("sparse", exponent_bits=4, mantissa_bits=2, bias=7, max=448.0)
    registered = registry_of(
        ("a", offering(techniques=[technique("t")], formats=[ODD, scale])), ("b", offering(techniques=[technique("u")]))
    )
    assert not registered.failures
    assert {name: registered.origin(name) for name in registered.techniques} == {"t": "a", "u": "b"}
    assert (registered.elements["odd"], registered.scales["sparse"]) == (ODD, scale)
    fresh = registry_of()
    assert (dict(fresh.techniques), fresh.elements) == ({}, ELEMENTS)


def test_the_first_of_two_plugins_keeps_the_name_that_both_offer() -> None:
    offers = {"techniques": [technique("t")]}, {"products": [ProductOperation("library::mm", Factors)]}
    plugins = [(name, offering(**offered)) for name, offered in zip("abcd", offers * 2, strict=True)]
    registered = registry_of(*plugins, ("a", offering(techniques=[technique("u")])))
    assert (registered.origin("t"), registered.products["library::mm"].plugin) == ("a", "b")
    assert list(registered.techniques) == ["t"]
    assert "technique 't' is already offered by plugin 'a'" in str(registered.failures["c"])
    assert "operator 'library::mm' is already read by plugin 'b'" in str(registered.failures["d"])
    assert "another plugin has this name" in str(registered.failures["a"])


def test_tables_are_read_only() -> None:
    empty = registry_of()
    for table in (empty.techniques, empty.elements, empty.scales, empty.policies, empty.products):
        with pytest.raises(TypeError):
            table["x"] = None  # type: ignore[index]


def test_entry_points_are_loaded_and_broken_ones_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good_fp4_plugin.py").write_text(
        "from fp4graph import hookimpl\n"
        "from tests.helpers.techniques import technique\n"
        "@hookimpl\n"
        "def fp4graph_techniques(): return [technique('mine')]\n"
    )
    (tmp_path / "bad_fp4_plugin.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "syntax_fp4_plugin.py").write_text("def (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    points = [EntryPoint(name, f"{name}_fp4_plugin", GROUP) for name in ("bad", "syntax", "gone", "good")]
    # Once a package, such as mlflow, has imported importlib_metadata, its class of entry points comes back.
    foreign = SimpleNamespace(name="foreign", group=GROUP, load=lambda: offering(techniques=[technique("fine")]))
    monkeypatch.setattr(registry, "entry_points", lambda group: [*points, foreign] if group == GROUP else ())
    registered = Registry()
    assert list(registered.techniques) == ["mine", "fine"]
    assert set(registered.failures) == {"bad", "syntax", "gone"}
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in str(registered.failures["bad"])
    assert "SyntaxError" in str(registered.failures["syntax"])


def test_shipped_techniques_come_from_entry_points() -> None:
    shipped = {point.name for point in entry_points(group=GROUP) if point.value == f"fp4graph_plugins.{point.name}"}
    registered = Registry()
    assert not registered.failures
    assert {name for name, cls in registered.techniques.items() if registered.origin(name) == cls.name} == shipped


@pytest.mark.long
@pytest.mark.process
def test_importing_loads_no_plugin_and_no_torch_device() -> None:
    code = (
        "import sys, torch, fp4graph, fp4graph.technique.registry; assert not torch.cuda.is_initialized(); "
        "assert not [m for m in sys.modules if m.startswith('fp4graph_plugins')]"
    )
    run(python("-c", code))


def test_every_hook_has_a_docstring() -> None:
    documented = [bool(hook.__doc__) for name, hook in vars(hookspecs).items() if name.startswith("fp4graph_")]
    assert documented == [True] * 4


def test_an_unknown_name_gets_the_nearest_or_all_known_names() -> None:
    assert suggest("hadamrd", ["q_ema", "hadamard"]) == "did you mean 'hadamard'?"
    assert suggest("zzz", ["q_ema", "hadamard"]) == "known: hadamard, q_ema"
    assert suggest("hadamrd", []) == "known: none"
