"""The command line: tables for people, JSON for programs, one line on stderr for mistakes."""

import json
import re
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from rich.table import Table

from fp4graph import QuantSpec, fake_quantize, load_policy
from fp4graph import __main__ as command
from fp4graph.commands import output, reference
from fp4graph.technique import registry
from fp4graph.technique.registry import Registry
from tests.helpers.long import long_but
from tests.helpers.processes import python, run
from tests.helpers.techniques import Broken, offering


@pytest.fixture
def fp4graph(capsys, monkeypatch):
    """Run the command as the installed script does; return its exit code, stdout and stderr."""

    def called(*arguments):
        monkeypatch.setattr(sys, "argv", ["fp4graph", *arguments])
        code = 0
        try:
            command.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return called


@pytest.fixture
def data(fp4graph):
    return lambda *arguments: json.loads(fp4graph(*arguments, "--json").out)


@pytest.fixture
def written(tmp_path):
    def write(text):
        (tmp_path / "p.yaml").write_text(f"version: 1\n{text}\n")
        return str(tmp_path / "p.yaml")

    return write


SHIPPED = ["bf16", "microscaling", "mxfp4", "nvfp4", "tetrajet", "tetrajet-qema"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param("policies", ["Ω", *SHIPPED], marks=pytest.mark.inductor),
        ("techniques", ["q_ema", "hadamard", "stochastic_rounding", "fusable", "O(n)"]),
        ("check tetrajet-qema", ["Q1", "Q6", "dgrad.weight", "e8m0 ceil", "nearest, ties up", "q_ema(beta=0.998",
                                 "tetrajet.yaml:"]),
        ("check bf16", ["This policy quantizes nothing"]),
    ],
)  # fmt: skip
def test_a_table_shows_these_words(arguments, words, fp4graph):
    result = fp4graph(*arguments.split())
    assert (result.code, result.err) == (0, "")
    for word in words:
        assert word in result.out


@pytest.mark.slow
def test_json_lists_the_shipped_policies(data):
    rows = {row["name"]: row for row in data("policies")}
    assert set(SHIPPED) <= set(rows)
    tetrajet = rows["tetrajet"]
    assert (tetrajet["complexity"], tetrajet["techniques"]) == (0.5, ["stochastic_rounding"])
    assert tetrajet["file"].endswith("tetrajet.yaml")
    assert rows["baseline"] == rows["bf16"] | {"name": "baseline", "description": "another name of bf16"}


@pytest.mark.slow
def test_a_technique_is_shown_as_its_reference_page_or_as_json(fp4graph, data):
    shipped = registry.default_registry()
    result = fp4graph("techniques", "q_ema")
    assert (result.code, result.out) == (0, reference.technique_page(shipped.techniques["q_ema"], shipped))
    shown = data("techniques", "q_ema")
    beta = shown["options"]["beta"]
    assert beta.pop("description")
    assert beta == {"type": "number above 0 and below 1", "required": False, "default": 0.998}
    assert {"round", "after_step"} <= set(shown["stages"])
    assert (shown["compute"], shown["memory"], shown["fusable"]) == ("O(n)", "O(n)", True)
    assert set(data("techniques", "stochastic_rounding")["options"]) >= {"operands", "bits"}  # by the names in policies


def test_a_policy_is_shown_as_its_reference_page_or_as_json(fp4graph, data):
    policy = load_policy("tetrajet-qema")
    result = fp4graph("policies", "tetrajet-qema")
    assert (result.code, result.out) == (0, reference.policy_page(policy))
    shown = data("policies", "tetrajet-qema")
    assert shown["weights"] == {"q_ema": 2.0, "stochastic_rounding": 0.5}
    assert shown["fingerprint"] == policy.fingerprint


@pytest.mark.slow
def test_a_page_is_rendered_on_a_terminal(fp4graph, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = fp4graph("techniques", "q_ema").out
    assert "\x1b[" in shown
    assert "| --- |" not in shown


def test_json_of_check_has_specs_and_weights(data):
    shown = data("check", "tetrajet")
    (rule,) = shown["rules"]
    assert rule["operands"]["dgrad.weight"] == {
        "element": "e2m1", "block": "32", "scale": "e8m0 ceil", "rounding": "stochastic", "source": "fprop",
    }  # fmt: skip
    assert (shown["default"]["keep"], shown["complexity"]) == ("no rule matches", 0.5)
    assert len(shown["fingerprint"]) == 64


def test_check_shows_ties_and_convention_of_scales_and_kept_operands(fp4graph, data, written):
    even, up = (f"default: {{scale: {{rounding: nearest_even, ties: {ties}}}}}" for ties in ("even", "up"))
    scale = data("check", written(even))["default"]["operands"]["fprop.input"]["scale"]
    assert scale == "e8m0 nearest_even ties even"
    assert "nearest_even ties" not in fp4graph("check", written(up)).out
    encode = written("default: {scale: {convention: encode, rounding: nearest_even}}")
    assert data("check", encode)["default"]["operands"]["fprop.input"]["scale"] == "e8m0 nearest_even encode"
    kept = fp4graph("check", written("default: {operands: {backward: keep}}")).out
    assert kept.count("high precision") == 4
    assert "every other site" in kept
    assert data("check", "bf16")["quantizes"] is False
    assert "quantizes nothing" not in fp4graph("check", "tetrajet").out


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("extends: tetrajet\nrules: [{match: {first_blocks: 1}, keep: sensitive}]", ":3: no rule quantizes"),
        ("rules:\n- match: {}\n  quantise: {}", ":4: unknown key 'quantise' in rules[0]; did you mean 'quantize'?\n"),
    ],
    ids=["nothing", "key"],
)
def test_check_of_a_wrong_policy_names_the_line(text, says, fp4graph, written):
    path = written(text)
    result = fp4graph("check", path)
    assert (result.code, result.out) == (1, "")
    assert result.err.startswith(path + says)
    assert result.err.count("\n") == 1


def script(code, *arguments):
    return run(python("-c", code, *arguments))


@pytest.mark.process
def test_help_is_fast_and_reading_policies_does_not_import_torch():
    """Printing help takes less than eight times as long as importing typer."""
    script("""
import sys
from typer.testing import CliRunner
from fp4graph.__main__ import app
def invoke(line):
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 0, result.output
    return result.output
for name in ["", *(command.callback.__name__.replace("_", "-") for command in app.registered_commands)]:
    assert "Usage" in invoke(f"{name} --help")
assert not {"torch", "numpy", "transformers"} & sys.modules.keys()
for line in ["policies", "policies tetrajet", "policies --schema", "techniques", "techniques q_ema", "check tetrajet"]:
    invoke(line)
    assert not {"torch._C", "numpy"} & sys.modules.keys(), line
""")

    def seconds(*code):
        begun = time.perf_counter()
        run(python(*code))
        return time.perf_counter() - begun

    # The least of five times, since other processes only add to it. Typer's import takes 0.08 s, help 0.35 s.
    helped, typer = (
        min(seconds(*code) for _ in range(5)) for code in (("-m", "fp4graph", "--help"), ("-c", "import typer"))
    )
    assert helped < 8 * typer


@pytest.mark.process
@pytest.mark.parametrize(
    "first",
    long_but(
        ["from torch import Tensor"],
        ["from torch import Tensor", "import torch.nn.functional", "from fp4graph.numerics.symbolic import *"],
    ),
)
def test_a_deferred_torch_is_imported_whole_and_once(first):
    """A third-party plugin may read torch during the plugin's own import."""
    printed = script(f"""
from fp4graph.commands.deferred import defer_torch
defer_torch()
import sys, torch
assert "torch._C" not in sys.modules
{first}
import fp4graph
import torch.fx.experimental.symbolic_shapes
assert torch.fx.Graph is torch.fx.graph.Graph
assert "frozen" in type(torch.fx.__spec__.loader).__module__
spec = fp4graph.QuantSpec("e2m1", 32, rounding="stochastic")
print(fp4graph.fake_quantize(torch.arange(64.0), spec, key=1).tolist())
""")
    spec = QuantSpec("e2m1", 32, rounding="stochastic")
    assert json.loads(printed) == fake_quantize(torch.arange(64.0), spec, key=1).tolist()


@pytest.mark.process
def test_an_import_of_torch_that_fails_raises_its_error_at_every_read(tmp_path):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libcudart is missing')")
    printed = script(f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from fp4graph.commands.deferred import defer_torch
defer_torch()
import torch
for _ in range(2):
    try:
        torch.Tensor
    except OSError as error:
        print(error)
""")
    assert printed == "libcudart is missing\n" * 2


@pytest.mark.process
def test_check_imports_torch_when_it_plans_products(data):
    arguments = ["check", "ue5m3-best", "--target", "b200"]
    assert json.loads(run(python("-m", "fp4graph", *arguments, "--json"))) == data(*arguments)


def test_completions_are_policies_and_policy_files_of_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tetrajet-mine.yaml").touch()
    names = output.policy_completions("tetrajet-")
    assert {"tetrajet-qema", "tetrajet-mine.yaml"} <= set(names)
    assert all(name.startswith("tetrajet-") for name in names)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["policies", __file__], 1, f"{__file__!r} is a file, and this command shows what is installed; fp4graph check "
                                    "shows a file\n"),
        (["policies", "tetrajett"], 1, "unknown policy 'tetrajett'; did you mean 'tetrajet'?\n"),
        (["techniques", "q_emma"], 1, "unknown technique 'q_emma'; did you mean 'q_ema'?\n"),
        (["check"], 2, "Usage"),
        (["nonsense"], 2, "Usage"),
        (["report", "x" * 5000], 1, "File name too long"),
        (["train", "digits", "--optimizer-option", "x" * 100_000], 1, "characters ...]"),
        (["explain", "--model", "deit_tiny_patch16_225", "bf16"], 1, "did you mean 'deit_tiny_patch16_224'?"),
        *((["explain", "--model", "test_vit", "--input-size", size, "bf16"], 1, "is not a shape")
          for size in ("a", "3,32,32", "3x0x32", "x")),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)  # fmt: skip
def test_a_mistake_is_a_message_without_a_traceback(arguments, code, says, fp4graph):
    if arguments[0] == "explain":
        pytest.importorskip("timm")
    result = fp4graph(*arguments)
    assert (result.code, result.out) == (code, "")
    assert says in result.err
    assert "Traceback" not in result.err
    assert code == 2 or result.err.count("\n") == 1
    assert len(result.err) < 11_000


def test_without_timm_the_error_names_the_extra(fp4graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    result = fp4graph("explain", "--model", "deit_tiny_patch16_224", "bf16")
    assert result.code == 1
    assert re.fullmatch(r"models are made with timm, which is not installed; pip install .*\[vision\]'\n", result.err)


@pytest.mark.slow
def test_broken_plugins_and_policies_are_warned_about_and_left_out(fp4graph, monkeypatch, tmp_path):
    path = tmp_path / "shabby.yaml"
    path.write_text("version: 9\n")
    broken = Registry([("shiny", Broken()), ("ships", offering(policies=[path]))])
    monkeypatch.setattr(registry, "default_registry", lambda: broken)
    result = fp4graph("policies")
    assert result.code == 0
    assert "tetrajet" in result.out
    warnings = result.err.splitlines()
    assert warnings[0] == "warning: plugin 'shiny': cannot be loaded: RuntimeError: out of order"
    assert warnings[1].startswith(f"warning: policy 'shabby' cannot be loaded: {path}:1: ")


@pytest.mark.long
@pytest.mark.compiler
def test_explain_prints_schedules(fp4graph, data, tmp_path):
    pytest.importorskip("timm")
    command = ("explain", "--model", "test_vit", "--schedule", "tetrajet-qema")
    text = fp4graph(*command, "--target", "b200", "--html", str(tmp_path / "page.html")).out
    for words in (
        "q_ema rounds elements", "as above", "multiplied in the dtype of the model", "tetrajet-qema on NVIDIA B200",
        "page.html shows this in a browser",
    ):  # fmt: skip
        assert words in text
    site = next(site for site in data(*command)["sites"] if site["quantized"])
    weight = {"by": "tensor code", "because": "q_ema rounds elements", "keeps": ["quantized values"]}
    assert site["schedule"]["fprop.weight"] == weight
    assert site["schedule"]["multiply"]["wgrad"] == "in the dtype of the model"
    assert "schedule" not in data("explain", "--model", "test_vit", "tetrajet")["sites"][0]


@pytest.mark.slow
def test_explain_lists_sites_with_their_rules_shapes_and_flops(fp4graph, data):
    pytest.importorskip("timm")
    command = ("explain", "--model", "test_vit", "tetrajet")
    shown = data(*command, "--batch-size", "3")
    sites = {site["module"]: site for site in shown["sites"]}
    qkv = sites["blocks.0.attn.qkv"]
    assert (qkv["quantized"], qkv["rule"], qkv["shapes"][0][0]) == (True, "transformer linears", 3)
    assert not sites["head"]["quantized"]
    assert shown["flops"] == sum(sum(groups.values()) for groups in shown["totals"].values())
    assert sum(site["share"] for site in shown["sites"]) == pytest.approx(1)
    every = fp4graph(*command, "--all").out
    assert "blocks.3.attn.qkv" in every
    assert "blocks.0-5" not in every


@pytest.mark.slow
@pytest.mark.parametrize("command", ["check", pytest.param("explain", marks=pytest.mark.long)])
def test_a_policy_is_checked_against_a_model(fp4graph, written, command):
    pytest.importorskip("timm")
    expecting = written("extends: tetrajet\nexpect: {quantized: {min: 1000}}")
    fits, does_not = (fp4graph(command, policy, "--model", "test_vit") for policy in ("tetrajet", expecting))
    assert (fits.code, does_not.code) == (0, 1)
    assert "blocks.0-5.attn.qkv" in fits.out
    assert "expected at least 1000 quantized site(s)" in does_not.err


CONTROL = "\x1b\x9b\x07\r\u202e"


def test_control_characters_of_a_policy_are_not_printed(fp4graph, tmp_path):
    evil = "[/x] " + "".join(f"{character}]0;title" for character in CONTROL)
    rules = [{"name": evil, "match": {"op": "linear"}, "keep": evil}]
    policy = {"version": 1, "name": "evil", "description": evil, "rules": rules, "default": "keep"}
    file = tmp_path / "evil.yaml"
    file.write_text(json.dumps(policy))  # which is YAML too
    for arguments in (["check", str(file)], ["check", str(file), "--json"], ["policies", evil]):
        result = fp4graph(*arguments)
        shown = result.out + result.err
        assert not set(CONTROL) & set(shown), arguments
        assert "[/x]" in shown
        assert "u001b]0;title" in shown or "policies" in arguments
    assert json.loads(fp4graph("check", str(file), "--json").out)["description"] == evil


def test_the_output_of_a_console_is_printable(capsys):
    table = Table("[/x] :smile: \x1b]0;column")
    table.add_row("a\x9bb")
    output.new_console(width=80).print("\x1b[31mred", table)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x9b"} & set(shown)
    assert "\\u001b[31mred" in shown
    assert "[/x] :smile:" in shown
