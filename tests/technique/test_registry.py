"""Finding plugins: what they may offer, and that a broken one hurts nobody else."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp4graph.errors import PluginError, PolicyError, suggest
from fp4graph.numerics.formats import E2M1, ELEMENTS, ElementFormat, ScaleFormat
from fp4graph.policy import load_policy
from fp4graph.technique import Factors, ProductOperation, hookspecs, registry
from fp4graph.technique.hookspecs import hookimpl
from fp4graph.technique.registry import GROUP, Registry
from tests.helpers.techniques import technique

ROOT = Path(__file__).parents[2]


def offering(
    techniques: Any = (), formats: Sequence[Any] = (), policies: Sequence[Any] = (), products: Sequence[Any] = ()
) -> object:
    """A plugin object that offers these."""
    offered = {"techniques": techniques, "formats": formats, "policies": policies, "products": products}
    hooks = {f"fp4graph_{kind}": hookimpl(lambda self, kind=kind: offered[kind]) for kind in offered}
    return type("Plugin", (), hooks)()


def registry_of(*plugins: tuple[str, object]) -> Registry:
    """The registry of these plugins, by name, and of no other."""
    return Registry(plugins, entry_point_group=None)


USES_T = {"version": 1, "default": {}, "techniques": ["t"]}


def hooks(**named: Callable[..., Any]) -> object:
    """A plugin object with these hooks."""
    return type("Plugin", (), {f"fp4graph_{name}": hookimpl(hook) for name, hook in named.items()})()


def raises(self: object) -> None:
    raise RuntimeError("out of order")


def wrong_signature(self: object, model: object) -> None: ...


ODD = ElementFormat("odd", exponent_bits=2, mantissa_bits=1, bias=1, max=6.0)
BROKEN = {
    "signature": (hooks(techniques=wrong_signature), "model"),
    "unknown hook": (hooks(techniqes=lambda self: []), "fp4graph_techniqes"),
    # Registering stops at the second, when the first is already pending.
    "two mistakes": (hooks(aardvark=lambda self: None, techniques=wrong_signature), "model"),
    "raises": (hooks(techniques=raises), "RuntimeError: out of order"),
    "not a technique": (offering([int]), "<class 'int'> is not a subclass of fp4graph.Technique"),
    "an instance": (offering([technique("t")()]), "is not a subclass of fp4graph.Technique"),
    "no overhead": (offering([technique("t", overhead=None)]), "Made must declare overhead"),
    "no name": (offering([technique("t", name=None)]), "Made must declare name"),
    "no complexity": (offering([technique("t", complexity=None)]), "Made must declare complexity"),
    "two of one name": (offering([technique("t"), technique("t")]), "technique 't' is already offered"),
    "half right": (offering([technique("t"), int]), "is not a subclass"),
    "not iterable": (offering(3), "TypeError"),  # type: ignore[arg-type]
    "not a format": (offering(formats=["e2m1"]), "'e2m1' is neither an ElementFormat nor a ScaleFormat"),
    "a taken format": (offering(formats=[E2M1]), "format 'e2m1' already exists"),
    "format after technique": (offering([technique("t")], [E2M1]), "format 'e2m1' already exists"),
    "a missing policy": (offering(policies=["/nowhere/p.yaml"]), "policy file '/nowhere/p.yaml' does not exist"),
    "not a product": (offering(products=[int]), "<class 'int'> is not a ProductOperation"),
    "no operator": (offering(products=[ProductOperation("mm", Factors)]), "'mm' is not of the form 'library::name'"),
    "a taken policy": (offering(policies=[ROOT / "policies/bf16.yaml"]), "'bf16' is already shipped"),
}  # fmt: skip


def test_entry_points_of_another_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """importlib.metadata returns those of importlib_metadata once mlflow, for one, has imported it."""
    point = SimpleNamespace(name="theirs", group="fp4graph", load=lambda: offering([technique("fine")]))
    monkeypatch.setattr("fp4graph.technique.registry.entry_points", lambda group: [point])
    found = Registry()
    assert not found.failures
    assert list(found.techniques) == ["fine"]


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("first", [True, False])
def test_a_broken_plugin_is_named_and_the_others_stay_usable(case: str, first: bool) -> None:
    plugin, message = BROKEN[case]
    healthy = ("healthy", offering([technique("fine")], [ODD]))
    plugins = [("broken", plugin), healthy] if first else [healthy, ("broken", plugin)]
    found = registry_of(*plugins)
    assert list(found.techniques) == ["fine"]
    assert found.elements == {**ELEMENTS, "odd": ODD}
    assert list(found.failures) == ["broken"]
    error = found.failures["broken"]
    assert isinstance(error, PluginError)
    assert error.plugin == "broken"
    assert str(error).startswith("plugin 'broken': ")
    assert message in str(error)


@pytest.mark.parametrize("case", ["raises", "format after technique", "half right", "unknown hook"])
def test_a_policy_is_told_of_the_plugin_that_may_have_its_technique(case: str) -> None:
    found = registry_of(("broken", BROKEN[case][0]), ("other", offering(formats=[E2M1])))
    with pytest.raises(PolicyError, match=r"unknown technique 't' \(plugin 'broken': .*\); known: none") as caught:
        load_policy(USES_T, found)
    assert BROKEN[case][1] in str(caught.value)
    assert "other" not in str(caught.value)  # which says what it offers


def test_a_policy_is_told_of_the_plugin_that_has_its_format() -> None:
    found = registry_of(("broken", offering(formats=[ODD, E2M1])))
    with pytest.raises(PolicyError, match=r"unknown element format 'odd' \(plugin 'broken': .*'e2m1' already exists\)"):
        load_policy({"version": 1, "default": {"element": "odd"}}, found)
    with pytest.raises(PolicyError, match="unknown element format 'even'; "):  # which no plugin offers
        load_policy({"version": 1, "default": {"element": "even"}}, found)
    with pytest.raises(PolicyError, match=r"no policy 'odd' is shipped \(plugin 'broken': .*\), and it is not a file"):
        load_policy("odd", found)


@pytest.mark.parametrize("weight", [math.nan, math.inf, -1.0, "1", None, True, 10**400, 1.7e308])
def test_a_weight_that_omega_cannot_add_is_refused(weight: object) -> None:
    cls = technique("t", complexity=property(lambda self: weight))
    found = registry_of(("odd", offering([cls])))
    with pytest.raises(PluginError, match="plugin 'odd': technique 't': complexity must be a number from 0") as caught:
        load_policy(USES_T, found)
    assert caught.value.plugin == "odd"


@pytest.mark.filterwarnings("ignore:.*has no effect here")
def test_a_weight_is_any_real_number_and_its_failure_is_named() -> None:
    for weight in (Fraction(1, 2), np.float32(0.5)):
        cls = technique("t", complexity=property(lambda self, weight=weight: weight))
        found = registry_of(("odd", offering([cls])))
        assert load_policy(USES_T, found).complexity == 0.5
    cls = technique("t", complexity=property(lambda self: 1 / 0))
    with pytest.raises(PluginError, match="plugin 'odd': technique 't': complexity: ZeroDivisionError"):
        load_policy(USES_T, registry_of(("odd", offering([cls]))))


def test_offers() -> None:
    scale = ScaleFormat("sparse", exponent_bits=4, mantissa_bits=2, bias=7, max=448.0)
    found = registry_of(("a", offering([technique("t")], [ODD, scale])), ("b", offering([technique("u")])))
    assert not found.failures
    assert list(found.techniques) == ["t", "u"]
    assert (found.origin("t"), found.origin("u")) == ("a", "b")
    assert found.elements["odd"] is ODD
    assert found.scales["sparse"] is scale


def test_a_technique_taken_from_another_plugin_names_it() -> None:
    found = registry_of(("a", offering([technique("t")])), ("b", offering([technique("t")])))
    assert found.origin("t") == "a"
    assert "technique 't' is already offered by plugin 'a'" in str(found.failures["b"])


def test_an_operator_is_read_by_one_plugin() -> None:
    plugins = [(name, offering(products=[ProductOperation("library::mm", Factors)])) for name in ("a", "b")]
    found = registry_of(*plugins)
    assert found.products["library::mm"].plugin == "a"
    assert "operator 'library::mm' is already read by plugin 'a'" in str(found.failures["b"])


def test_two_plugins_of_one_name() -> None:
    found = registry_of(("a", offering([technique("t")])), ("a", offering([technique("u")])))
    assert list(found.techniques) == ["t"]
    assert "another plugin has this name" in str(found.failures["a"])


def test_each_registry_is_its_own() -> None:
    registry_of(("a", offering([technique("t")], [ODD])))
    fresh = Registry(entry_point_group=None)
    assert not fresh.techniques
    assert fresh.elements == ELEMENTS


def test_tables_are_read_only() -> None:
    found = Registry(entry_point_group=None)
    for table in (found.techniques, found.elements, found.scales, found.policies, found.products):
        with pytest.raises(TypeError):
            table["x"] = None  # type: ignore[index]


def test_entry_points_are_loaded_and_broken_ones_isolated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "good_fp4_plugin.py").write_text(
        "from typing import ClassVar\n"
        "from fp4graph.technique import Overhead, Technique\n"
        "from fp4graph.technique.hookspecs import hookimpl\n"
        "class Mine(Technique):\n"
        "    name: ClassVar[str] = 'mine'\n"
        "    overhead: ClassVar[Overhead] = Overhead('O(1)', 'O(1)', True)\n"
        "    @property\n"
        "    def complexity(self): return 0.5\n"
        "@hookimpl\n"
        "def fp4graph_techniques(): return [Mine]\n"
    )
    (tmp_path / "bad_fp4_plugin.py").write_text("import no_such_module_anywhere\n")
    (tmp_path / "syntax_fp4_plugin.py").write_text("def (:\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    points = tuple(EntryPoint(name, f"{name}_fp4_plugin", GROUP) for name in ("bad", "syntax", "gone", "good"))
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == GROUP else ())
    found = Registry()
    assert list(found.techniques) == ["mine"]
    assert found.techniques["mine"]().complexity == 0.5
    assert set(found.failures) == {"bad", "syntax", "gone"}
    assert "ModuleNotFoundError: No module named 'no_such_module_anywhere'" in str(found.failures["bad"])
    assert "SyntaxError" in str(found.failures["syntax"])


def test_first_party_techniques_come_through_the_same_door() -> None:
    points = {point.name: point.value for point in entry_points(group=GROUP)}
    found = Registry()
    assert not found.failures
    for name in ("stochastic_rounding", "hadamard", "q_ema"):
        assert points[name] == f"fp4graph_plugins.{name}"
        assert found.techniques[name].name == name
        assert found.origin(name) == name


@pytest.mark.long
@pytest.mark.process
def test_importing_loads_no_plugin_and_no_torch_device() -> None:
    code = (
        "import sys, fp4graph, fp4graph.technique.registry\n"
        "assert not [m for m in sys.modules if m.startswith('fp4graph_plugins')]\n"
        "torch = sys.modules.get('torch')\n"
        "assert torch is None or not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_hook_has_a_sentence() -> None:
    hooks = [hook for name, hook in vars(hookspecs).items() if name.startswith("fp4graph_")]
    assert len(hooks) == 4
    for hook in hooks:
        assert hook.__doc__


@pytest.mark.parametrize(
    ("name", "hint"),
    [("hadamrd", "did you mean 'hadamard'?"), ("zzz", "known: hadamard, q_ema")],
)
def test_suggestions(name: str, hint: str) -> None:
    assert suggest(name, ["q_ema", "hadamard"]) == hint
    assert suggest(name, []) == "known: none"
