"""Every benchmark measures what it says, shown on tiny models without compiling."""

import copy
import importlib
import itertools
import math
import os
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph import QuantSpec, ScaleSpec, fake_quantize

pytest.importorskip("psutil", reason="benchmarks need the extra 'bench'")
pytest.importorskip("cpuinfo", reason="benchmarks need the extra 'bench'")

from benchmarks import experts, first_step, linear, step
from benchmarks.command import Settings
from benchmarks.first_step import measure, run
from benchmarks.linear import Case
from benchmarks.memory import of_linear, of_linears, of_model, saved
from benchmarks.models import MODELS, Training, of_inner_blocks
from benchmarks.peers import PEERS, installed
from benchmarks.processes import Inapplicable, attempt, process
from benchmarks.quantizers import quantizers
from benchmarks.timing import Patience

CPU = torch.device("cpu")
QUICK = ("--backend=eager", "--seconds=0")


def check_ratio(figures):
    assert figures["repeats"] == len(figures["pairs"])
    (pair,) = figures["pairs"]
    assert figures["ratio"] == pytest.approx(pair[1] / pair[0])
    assert math.isfinite(figures["ratio"])


@pytest.mark.long
@pytest.mark.process
def test_a_linear_beside_the_unquantized_one_and_a_peer(command):
    pytest.importorskip("torchao.prototype.qat")
    options = ("--shapes=trial", "--dtypes=float32", "--peers=", *QUICK)
    code, rows, _ = command("linear", *options, "--policies=bf16,tetrajet,nvfp4-te")
    assert code == 0
    measured = {(row["case"]["linear"], row["case"]["to"]): row["figures"] for row in rows}
    pairs = itertools.product(("bf16", "tetrajet", "nvfp4-te"), ("unquantized", "torchao, compiled"))
    assert measured.keys() == {("unquantized, eager", "unquantized"), *pairs}
    for policy in ("tetrajet", "nvfp4-te"):  # nvfp4-te as in an inner block, of which it quantizes all
        check_ratio(measured[policy, "unquantized"])
        assert measured[policy, "unquantized"]["quantizes"] == "Q1 to Q6"
    figures = measured["tetrajet", "unquantized"]  # each of three tensors is read once and written twice
    moved = 4 * 3 * (64 * 64 + 96 * 64 + 64 * 96) / figures["bandwidth"]
    assert figures["floor"] == pytest.approx(1 + moved / figures["baseline_seconds"])
    assert measured["tetrajet", "unquantized"]["floor"] > measured["bf16", "unquantized"]["floor"] == 1


def outcomes(cases, *names):
    return {tuple(case[name] for name in names): attempt(measure) for case, measure in cases}


def test_a_baseline_that_fails_and_a_peer_that_is_not_installed_end_no_run(monkeypatch):
    monkeypatch.setattr(Case, "unquantized", Mock(side_effect=RuntimeError("no compiler")))
    monkeypatch.setattr(linear, "installed", lambda name: False)
    case, settings = Case("trial", torch.float32, CPU, "eager"), Settings(CPU, "eager", Patience(0))
    found = outcomes(linear.of_case(case, ["bf16"], [], "torchao", settings), "linear", "to")
    failed, missing = {"failed": "RuntimeError: no compiler"}, {"inapplicable": "not installed: pip install torchao"}
    expected = {(name, "unquantized"): failed for name in ("unquantized, eager", "bf16")}
    assert found == expected | {("bf16", "torchao, compiled"): missing}
    monkeypatch.setattr(step, "started", Mock(side_effect=RuntimeError("no compiler")))
    found = outcomes(step.cases(settings, "trial-vit", "bf16", "float32", None), "policy")
    assert found == {("bf16",): failed}


def test_a_policy_without_experts_or_linears_to_quantize_does_not_apply():
    settings = Settings(CPU, "eager", Patience(0))
    found = outcomes(experts.cases(settings, 2, 32, 64, "float32", "bf16"), "experts")
    assert found == {("bf16",): {"inapplicable": "the policy quantizes nothing"}}
    with pytest.raises(Inapplicable, match="quantizes no linear"):
        of_linears("trial-vit", 4, "bf16", CPU, "eager")
    with pytest.raises(Inapplicable, match="matches no site"):  # there is no block but the first and the last
        of_model("trial-vit", 4, "nvfp4-te", CPU, "eager")


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "option", "said"),
    [
        ("linear", "--against=abacus", "abacus"),
        ("linear", "--peers=abacus", "abacus"),
        ("step", "--policies=tetrajet,abacus", "abacus"),
        ("step", "--backend=abacus", "abacus"),
        ("step", "--repeats=1", "3"),  # a single ratio has no quartiles
    ],
)
def test_an_option_that_cannot_be_met_ends_the_command_before_its_first_case(name, option, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"benchmarks.{name}").app([option, f"--folder={tmp_path}"])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore::fp4graph.PolicyWarning")
def test_a_linear_by_itself_stands_for_an_inner_block():
    for policy in ("if4", "nvint4", "nvfp4-te", "nvfp4-te-last-blocks"):
        explanation = fp4graph.explain(nn.Linear(64, 96), of_inner_blocks(policy), (torch.ones(64, 64),))
        assert any(explanation.sites[0].operands.values()), policy


@pytest.mark.slow
def test_a_cheaper_policy_under_another_name_is_not_measured():
    case = Case("trial", torch.float32, CPU, "eager")
    case.check(case.applied("tetrajet", "eager"), "tetrajet")
    for cheaper in ("bf16", "tetrajet-q1", "tetrajet-no-wq", "microscaling"):
        with pytest.raises(RuntimeError, match=r"tetrajet: compiled .* differs"):
            case.check(case.applied(cheaper, "eager"), "tetrajet")


@pytest.mark.parametrize(("peer", "rounding"), [("torchao", "ceil"), ("brevitas", "floor")])
def test_peers_quantize_input_and_weight_to_mxfp4(peer, rounding):
    if not installed(peer):
        pytest.skip(f"{peer} is not installed")
    spec = QuantSpec(scale=ScaleSpec("e8m0", rounding))
    plain, x = nn.Linear(64, 96, bias=False), torch.randn(32, 64, requires_grad=True)
    y = PEERS[peer](copy.deepcopy(plain))(x)
    expected = fake_quantize(x.detach(), spec) @ fake_quantize(plain.weight.detach(), spec).T
    torch.testing.assert_close(y.detach(), expected, rtol=1e-4, atol=1e-5)
    if peer == "torchao":  # brevitas differentiates the scales too
        (dx,) = torch.autograd.grad(y.sum(), x)
        expected = fake_quantize(plain.weight.detach(), spec).sum(0).expand_as(dx)
        torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-5)


def test_equal_quantizers_are_measured_once_and_those_of_the_optimizer_not_at_all():
    found = quantizers(["tetrajet", "tetrajet-qramping", "tetrajet-qema", "mxfp4-full-hadamard", "mxfp4-full"])
    names = {quantizer.name: quantizer.policies for quantizer in found}
    assert names == {
        "e2m1/32 e8m0 ceil RTN-up": ("tetrajet", "tetrajet-qramping", "tetrajet-qema"),
        "e2m1/32 e8m0 ceil SR": ("tetrajet", "tetrajet-qramping", "tetrajet-qema"),
        "e2m1/32 e8m0 ceil RTN-up + q_ema()": ("tetrajet-qema",),
        "e2m1/32 e8m0 floor RTN-even": ("mxfp4-full-hadamard", "mxfp4-full"),
    }


@pytest.mark.slow
@pytest.mark.process
def test_a_quantizer_alone_gives_what_its_spec_says(command):
    x = torch.randn(64, 96)
    (nearest,) = (q for q in quantizers(["tetrajet"]) if q.name.endswith("RTN-up"))
    spec = QuantSpec(scale=ScaleSpec("e8m0", "ceil"), ties="up")
    assert torch.equal(nearest.compiled(x, "eager")(x), fake_quantize(x, spec))
    assert torch.equal(nearest.compiled(x.mT, "eager")(x.mT), fake_quantize(x, spec, 0).mT)
    options = ("--policies=tetrajet-qema", "--dtypes=bfloat16", "--rows=64", "--columns=96")
    code, rows, _ = command("quantizers", *options, *QUICK)
    assert code == 0
    assert {row["case"]["layout"] for row in rows} == {"row", "column"}
    for figures in (row["figures"] for row in rows):
        check_ratio(figures)
        (seconds,) = (own for _, own in figures["pairs"])
        assert figures["bytes_per_second"] == pytest.approx(2 * 64 * 96 * 2 / seconds)


@pytest.mark.long
@pytest.mark.slow
def test_a_training_step_of_both_kinds_of_model(command):
    options = ("--models=trial-vit,trial-llama", "--dtypes=bfloat16", "--policies=microscaling", *QUICK)
    code, rows, _ = command("step", *options)
    assert code == 0
    assert {row["case"]["model"]: row["figures"]["quantized"] for row in rows} == {"trial-vit": 8, "trial-llama": 14}
    assert len(rows) == 2
    for row in rows:
        check_ratio(row["figures"])
        assert row["figures"]["floor"] > 1


@pytest.mark.long
@pytest.mark.slow
def test_the_steps_of_a_model_train_it():
    for policy in ("unquantized", "tetrajet"):
        training = Training(MODELS["trial-llama"], policy, 4, torch.float32, CPU, "eager")
        training.compile()
        losses = [training.step().item() for _ in range(12)]
        assert losses[-1] < losses[0], policy


def test_both_models_of_a_first_step_start_once_with_new_caches_and_once_with_warm_ones():
    calls = []

    def start(policy, cache):
        calls.append((policy, cache))
        return {"seconds": 2.0 if policy == "tetrajet" else 1.0, "hits": 0}

    figures = measure(start, "tetrajet", Patience(0, least=3))
    assert [policy for policy, _ in calls] == ["unquantized", "tetrajet"] * 2
    assert calls[:2] == calls[2:]  # the warm starts have the caches of the cold starts
    assert len({cache for _, cache in calls}) == 2
    assert figures["cold"]["ratio"] == figures["warm"]["ratio"] == 2.0
    measure(start, "tetrajet", Patience(60, least=2, most=2))
    assert len({cache for _, cache in calls}) == 6  # new ones for each repeat


@pytest.mark.long
@pytest.mark.process
def test_a_process_times_its_first_step(tmp_path):
    said = run("trial-vit", 4, "float32", CPU, "eager", "tetrajet", str(tmp_path))
    assert said["seconds"] > 0
    assert math.isfinite(said["loss"])


@pytest.mark.process
def test_variables_of_a_process_are_its_own():
    with process(TORCHINDUCTOR_CACHE_DIR="elsewhere") as pool:
        assert pool.submit(os.getenv, "TORCHINDUCTOR_CACHE_DIR").result() == "elsewhere"
    assert os.getenv("TORCHINDUCTOR_CACHE_DIR") != "elsewhere"


def test_a_start_that_fails_is_tried_once_and_reported_as_cold_and_warm(monkeypatch):
    fails = Mock(side_effect=[{}, RuntimeError("killed")])  # the first start only reads libraries into memory
    monkeypatch.setattr(first_step, "run", fails)
    settings = Settings(CPU, "eager", Patience(0))
    rows = [(case["cache"], figures()) for case, figures in first_step.cases(settings)]
    assert rows == [("cold", {"failed": "RuntimeError: killed"}), ("warm", {"failed": "RuntimeError: killed"})]


def test_what_a_plain_linear_keeps_is_its_input_and_its_weight():
    assert of_linear(64, 32, 96, "unquantized", CPU, "aot_eager") == (2 * (64 * 32 + 96 * 32), 2 * 64 * 32)
    plain, x = nn.Linear(32, 96, bias=False), torch.randn(64, 32, requires_grad=True)
    shared = saved(lambda: plain(x) + plain(x), plain.parameters())  # memory that is saved twice counts once
    assert shared == (4 * (64 * 32 + 96 * 32), 4 * 64 * 32)


@pytest.mark.slow
def test_bytes_of_a_linear_are_those_of_an_inner_block():
    """The policy keeps the last blocks, and refuses a linear that stands for one."""
    kept = of_linear(64, 32, 96, "if4", CPU, "aot_eager")
    assert kept != of_linear(64, 32, 96, "unquantized", CPU, "aot_eager")


@pytest.mark.slow
def test_what_a_compiled_graph_keeps_is_what_its_function_saved():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 64))
    fp4graph.apply(model, "tetrajet", backend="aot_eager")
    x = torch.randn(64, 32, requires_grad=True)
    model(x).sum().backward()
    result = model(x)
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in result.grad_fn.saved_tensors}
    assert type(result.grad_fn).__name__ == "CompiledFunctionBackward"
    assert saved(lambda: model(x), model.parameters())[0] == sum(kept.values())


@pytest.mark.long
@pytest.mark.slow
def test_bytes_of_all_linears_and_of_the_model(command):
    code, rows, _ = command("memory", "--models=trial-vit", "--policies=microscaling", "--backend=aot_eager")
    assert code == 0
    by_kind = {row["case"]["of"]: row["figures"] for row in rows}
    weights = 2 * (192 * 64 + 64 * 64 + 256 * 64 + 64 * 256)
    inputs = 68 * (64 + 64 + 64 + 256)
    assert by_kind["linears"]["baseline_bytes"] == 2 * (weights + 2 * inputs)  # two blocks, bf16
    assert by_kind["linears"]["activation_baseline_bytes"] == 2 * 2 * inputs
    assert by_kind["model"]["bytes"] > by_kind["model"]["activation_bytes"] > 0
