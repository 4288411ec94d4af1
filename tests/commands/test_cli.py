"""The command line: tables for people, JSON for programs, one line on stderr for mistakes."""

import json
import subprocess
import sys

import pytest
from rich.table import Table

from fp4graph import cli, load_policy
from fp4graph.commands import output, reference
from fp4graph.technique import registry
from fp4graph.technique.hookspecs import hookimpl
from fp4graph.technique.registry import Registry


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def data(self):
        return json.loads(self.out)


@pytest.fixture
def fp4graph(capsys, monkeypatch):
    """Runs the command as the installed script does."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fp4graph", *arguments])
        code = 0
        try:
            cli.main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Result(code, *capsys.readouterr())

    return run


SHIPPED = ["bf16", "microscaling", "mxfp4", "nvfp4", "tetrajet", "tetrajet-qema"]


@pytest.mark.inductor
def test_policies(fp4graph):
    result = fp4graph("policies")
    assert (result.code, result.err) == (0, "")
    assert "Ω" in result.out
    for name in SHIPPED:
        assert name in result.out


@pytest.mark.slow
def test_policies_as_json(fp4graph):
    rows = {row["name"]: row for row in fp4graph("policies", "--json").data}
    assert set(SHIPPED) <= set(rows)
    assert rows["tetrajet"]["complexity"] == 0.5
    assert rows["tetrajet"]["techniques"] == ["stochastic_rounding"]
    assert rows["tetrajet"]["file"].endswith("tetrajet.yaml")
    assert rows["baseline"] == rows["bf16"] | {"name": "baseline", "description": "another name of bf16"}


def test_techniques(fp4graph):
    result = fp4graph("techniques")
    assert (result.code, result.err) == (0, "")
    for words in ("q_ema", "hadamard", "stochastic_rounding", "fusable", "O(n)"):
        assert words in result.out


@pytest.mark.slow
def test_one_technique(fp4graph):
    found = registry.default_registry()
    result = fp4graph("techniques", "q_ema")
    assert result.code == 0
    assert result.out == reference.technique_page(found.techniques["q_ema"], found)
    data = fp4graph("techniques", "q_ema", "--json").data
    beta = data["options"]["beta"]
    assert beta.pop("description")
    assert beta == {"type": "number above 0 and below 1", "required": False, "default": 0.998}
    assert {"round", "state", "after_step"} <= set(data["stages"])
    assert (data["compute"], data["memory"], data["fusable"]) == ("O(n)", "O(n)", True)


def test_one_policy(fp4graph):
    result = fp4graph("policies", "tetrajet-qema")
    assert result.code == 0
    assert result.out == reference.policy_page(load_policy("tetrajet-qema"))
    data = fp4graph("policies", "tetrajet-qema", "--json").data
    assert data["weights"] == {"q_ema": 2.0, "stochastic_rounding": 0.5}
    assert data["fingerprint"] == load_policy("tetrajet-qema").fingerprint


def test_a_page_is_rendered_on_a_terminal(fp4graph, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = fp4graph("techniques", "q_ema").out
    assert "\x1b[" in shown
    assert "| --- |" not in shown


def test_unknown_policy(fp4graph):
    result = fp4graph("policies", "tetrajett")
    assert (result.code, result.out) == (1, "")
    assert "unknown policy 'tetrajett'; did you mean 'tetrajet'?\n" in result.err


def test_options_are_shown_as_policies_write_them(fp4graph):
    assert set(fp4graph("techniques", "stochastic_rounding", "--json").data["options"]) >= {"operands", "bits"}


def test_unknown_technique(fp4graph):
    result = fp4graph("techniques", "q_emma")
    assert (result.code, result.out) == (1, "")
    assert result.err == "unknown technique 'q_emma'; did you mean 'q_ema'?\n"


def test_check(fp4graph):
    result = fp4graph("check", "tetrajet-qema")
    assert (result.code, result.err) == (0, "")
    for words in ("Q1", "Q6", "dgrad.weight", "e8m0 ceil", "nearest, ties up", "q_ema(beta=0.998", "tetrajet.yaml:"):
        assert words in result.out


def test_check_as_json(fp4graph):
    data = fp4graph("check", "tetrajet", "--json").data
    (rule,) = data["rules"]
    assert rule["operands"]["dgrad.weight"] == {
        "element": "e2m1",
        "block": "32",
        "scale": "e8m0 ceil",
        "rounding": "stochastic",
        "source": "fprop",
    }
    assert data["default"]["keep"] == "no rule matches"
    assert data["complexity"] == 0.5
    assert len(data["fingerprint"]) == 64


def test_check_says_where_ties_of_scales_go(fp4graph, tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\ndefault: {scale: {rounding: nearest_even, ties: even}}\n")
    assert fp4graph("check", str(path), "--json").data["default"]["operands"]["fprop.input"]["scale"] == (
        "e8m0 nearest_even ties even"
    )
    path.write_text("version: 1\ndefault: {scale: {rounding: nearest_even, ties: up}}\n")
    assert "nearest_even ties" not in fp4graph("check", str(path)).out


def test_check_says_that_nothing_is_quantized(fp4graph, tmp_path):
    assert "This policy quantizes nothing" in fp4graph("check", "bf16").out
    assert fp4graph("check", "bf16", "--json").data["quantizes"] is False
    assert "quantizes nothing" not in fp4graph("check", "tetrajet").out
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nextends: tetrajet\nrules: [{match: {first_blocks: 1}, keep: sensitive}]\n")
    result = fp4graph("check", str(path))
    assert result.code == 1
    assert f"{path}:3: no rule quantizes" in result.err


def test_check_of_kept_operands(fp4graph, tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\ndefault: {operands: {backward: keep}}\n")
    result = fp4graph("check", str(path))
    assert result.out.count("high precision") == 4
    assert "every other site" in result.out


def test_check_of_a_wrong_policy_is_one_line(fp4graph, tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("version: 1\nrules:\n  - match: {}\n    quantise: {}\n")
    result = fp4graph("check", str(path))
    assert (result.code, result.out) == (1, "")
    assert result.err == f"{path}:4: unknown key 'quantise' in rules[0]; did you mean 'quantize'?\n"


@pytest.mark.process
def test_the_installed_command(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("version: 3\n")
    done = subprocess.run(
        [sys.executable, "-c", "from fp4graph.cli import main; main()", "check", str(path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"{path}:1: ")
    assert "Traceback" not in done.stderr


def test_usage_errors_are_typers(fp4graph):
    assert fp4graph("check").code == 2
    assert fp4graph("nonsense").code == 2


@pytest.mark.slow
def test_broken_plugins_and_policies_are_warnings(fp4graph, monkeypatch, tmp_path):
    class Raises:
        @hookimpl
        def fp4graph_techniques(self):
            raise RuntimeError("out of order")

    class Ships:
        @hookimpl
        def fp4graph_policies(self):
            return [path]

    path = tmp_path / "shabby.yaml"
    path.write_text("version: 9\n")
    found = Registry([("shiny", Raises()), ("ships", Ships())])
    monkeypatch.setattr(output, "default_registry", lambda: found)
    result = fp4graph("policies")
    assert result.code == 0
    assert "tetrajet" in result.out
    warnings = result.err.splitlines()
    assert warnings[0] == "warning: plugin 'shiny': cannot be loaded: RuntimeError: out of order"
    assert warnings[1].startswith(f"warning: policy 'shabby' cannot be loaded: {path}:1: ")
    assert registry.default_registry() is not found


def test_without_timm(fp4graph, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    result = fp4graph("explain", "--model", "deit_tiny_patch16_224", "bf16")
    assert result.code == 1
    assert result.err == "models are made with timm, which is not installed; pip install 'fp4graph[vision]'\n"


@pytest.fixture
def timm():
    return pytest.importorskip("timm")


@pytest.mark.usefixtures("timm")
def test_unknown_model(fp4graph):
    result = fp4graph("explain", "--model", "deit_tiny_patch16_225", "bf16")
    assert result.code == 1
    assert "did you mean 'deit_tiny_patch16_224'?" in result.err


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("size", ["224", "3,32,32", "3x0x32", "x"])
def test_wrong_shape(size, fp4graph):
    result = fp4graph("explain", "--model", "test_vit", "--input-size", size.replace("224", "a"), "bf16")
    assert result.code == 1
    assert "is not a shape" in result.err


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.usefixtures("timm")
def test_explain_prints_schedules(fp4graph):
    command = ("explain", "--model", "test_vit", "--schedule", "tetrajet-qema")
    text = fp4graph(*command).out
    assert "q_ema rounds elements" in text
    assert "as above" in text
    site = next(site for site in fp4graph(*command, "--json").data["sites"] if site["quantized"])
    weight = {"by": "tensor code", "because": "q_ema rounds elements", "keeps": ["quantized values"]}
    assert site["schedule"]["fprop.weight"] == weight
    assert site["schedule"]["multiply"]["wgrad"] == "in the dtype of the model"
    assert "multiplied in the dtype of the model" in text
    assert "schedule" not in fp4graph("explain", "--model", "test_vit", "--json", "tetrajet").data["sites"][0]


@pytest.mark.slow
@pytest.mark.usefixtures("timm")
def test_explain(fp4graph):
    result = fp4graph("explain", "--model", "test_vit", "--batch-size", "3", "--json", "tetrajet")
    assert result.code == 0
    sites = {site["module"]: site for site in result.data["sites"]}
    assert sites["blocks.0.attn.qkv"]["quantized"]
    assert sites["blocks.0.attn.qkv"]["rule"] == "transformer linears"
    assert sites["blocks.0.attn.qkv"]["shapes"][0][0] == 3
    assert not sites["head"]["quantized"]
    assert result.data["flops"] == sum(sum(groups.values()) for groups in result.data["totals"].values())
    assert sum(site["share"] for site in result.data["sites"]) == pytest.approx(1)
    text = fp4graph("explain", "--model", "test_vit", "tetrajet").out
    assert "blocks.0-5.attn.qkv" in text
    every = fp4graph("explain", "--model", "test_vit", "--all", "tetrajet").out
    assert "blocks.3.attn.qkv" in every
    assert "blocks.0-5" not in every


@pytest.mark.slow
@pytest.mark.usefixtures("timm")
def test_check_against_a_model(fp4graph, tmp_path):
    result = fp4graph("check", "tetrajet", "--model", "test_vit")
    assert result.code == 0
    assert "blocks.0-5.attn.qkv" in result.out
    path = tmp_path / "p.yaml"
    path.write_text("version: 1\nextends: tetrajet\nexpect:\n  quantized: {min: 1000}\n")
    result = fp4graph("check", str(path), "--model", "test_vit")
    assert result.code == 1
    assert "expected at least 1000 quantized site(s)" in result.err


CONTROL = "\x1b\x9b\x07\r\u202e"


def test_control_characters_of_a_policy_are_not_printed(fp4graph, tmp_path):
    evil = "[/x] " + "".join(f"{character}]0;title" for character in CONTROL)
    policy = {"version": 1, "name": "evil", "description": evil,
              "rules": [{"name": evil, "match": {"op": "linear"}, "keep": evil}], "default": "keep"}  # fmt: skip
    file = tmp_path / "evil.yaml"
    file.write_text(json.dumps(policy))  # which is YAML too
    for arguments in (["check", str(file)], ["check", str(file), "--json"], ["policies", evil]):
        result = fp4graph(*arguments)
        shown = result.out + result.err
        assert not set(CONTROL) & set(shown), arguments
        assert "[/x]" in shown
        assert "u001b]0;title" in shown or "policies" in arguments
    assert json.loads(fp4graph("check", str(file), "--json").out)["description"] == evil


def test_a_name_that_no_file_can_have_is_a_message(fp4graph):
    result = fp4graph("report", "x" * 5000)
    assert result.code == 1
    assert "File name too long" in result.err
    assert "Traceback" not in result.err


def test_a_message_is_no_longer_than_a_page(fp4graph):
    result = fp4graph("train", "digits", "--optimizer-option", "x" * 100_000)
    assert result.code == 1
    assert len(result.err) < 11_000
    assert "characters ...]" in result.err


def test_the_output_of_a_console_is_printable(capsys):
    table = Table("[/x] :smile: \x1b]0;column")
    table.add_row("a\x9bb")
    output.new_console(width=80).print("\x1b[31mred", table)
    shown = capsys.readouterr().out
    assert not {"\x1b", "\x9b"} & set(shown)
    assert "\\u001b[31mred" in shown
    assert "[/x] :smile:" in shown
