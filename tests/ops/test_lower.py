"""Lowering: under every shipped policy the operators run that the schedule names, and the reasons in it are true."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fp4graph_policies
import pytest
import torch

import fp4graph
from fp4graph.kernels.machine import Machine
from fp4graph.kernels.request import Asked
from fp4graph.kernels.rows import TENSOR_CODE
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.lower import lower
from fp4graph.ops.schedule import Keeps, Schedule, Setting, Source, Step
from fp4graph.technique.operands import Gemm, Operand
from tests.helpers.long import long_but_few
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.sites import program_of
from tests.helpers.stacks import HIDDEN, KINDS, TOKENS, WIDTH, Blocks

pytestmark = pytest.mark.usefixtures("operation_by_operation")

POLICIES = sorted(file.stem for file in Path(fp4graph_policies.__file__).parent.glob("*.yaml"))
#: The stages at which a technique may call the quantizer any number of times.
SEVERAL = ("around", "observe", "element_surrogate", "scale_surrogate", "statistic_gradient", "group_gradient")
FP32 = torch.float32
#: A training step of an fp32 model on a CPU with kernels.
TRAINING = Setting(Machine("cpu"), (FP32, FP32), FP32, (True, True), drawn=True)


def operators_of(call: Callable[[], object]) -> Counter[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = (event.name.partition("::") for event in profile.events())
    return Counter(name for space, _, name in names if space == "fp4graph")


#: The operators of which each call quantizes one operand.
COUNTED = {
    *("quantize", "quantize_and_pack", "requantize"),
    *("quantize_at", "requantize_at", "quantized_product", "requantized_product"),
}


def operator_of(step: Step) -> str | None:
    """Return the operator that quantizes an operand; None for tensor code, and for bytes that are ready."""
    if step.kernel is None or step.kernel == TENSOR_CODE or step.source is Source.READY:
        return None
    again = "requantize" if step.source is Source.BYTES else "quantize"
    if step.in_product:
        return f"{again}d_product"
    if step.asked is Asked.PLACES:
        return f"{again}_at"
    return {Asked.VALUES: "quantize", Asked.BYTES: "quantize_and_pack", Asked.FROM_BYTES: "requantize"}[step.asked]


def steps_of(program: MatmulProgram, setting: Setting) -> dict[str, Step]:
    return {operand.value: step for operand, step in lower(program, setting).steps().items()}


first_program = partial(program_of, inputs=WIDTH, outputs=HIDDEN)


def expected(schedule: Schedule) -> Counter[str]:
    """Return how often each operator quantizes an operand, apart from the calls that techniques make."""
    return Counter(name for step in schedule.steps().values() if (name := operator_of(step)) is not None)


def lowered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[MatmulProgram, Setting, Schedule]]:
    """Return a list to which every schedule is appended when it is made, with what it is made from."""
    seen: list[tuple[MatmulProgram, Setting, Schedule]] = []

    def spy(program: MatmulProgram, setting: Setting) -> Schedule:
        schedule = lower(program, setting)
        seen.append((program, setting, schedule))
        return schedule

    monkeypatch.setattr("fp4graph.ops.matmul.lower", spy)
    return seen


@pytest.mark.slow
@pytest.mark.compiler
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", long_but_few(POLICIES))
def test_the_operators_that_run_are_those_of_the_schedule(
    policy: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fp4graph.apply(Blocks(kind), policy, backend="eager", seed=0, total_forwards=4)
    fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    ends = torch.tensor([7, 31, TOKENS], dtype=torch.int32)
    seen = lowered(monkeypatch)
    try:
        model(x, ends)
        seen.clear()
        ran = operators_of(lambda: model(x, ends).backward(torch.ones_like(x)))
    except (fp4graph.CaptureError, fp4graph.PolicyError):
        assert (kind == "experts") != policy.endswith("-experts")
        return
    assert bool(seen) == fp4graph.load_policy(policy).quantizes
    due = sum((expected(schedule) for _, _, schedule in seen), Counter[str]())
    operands = [program.operand(each) for program, _, _ in seen for each in Operand]
    calls = any(operand.at(stage) for operand in operands for stage in SEVERAL)
    counts = {name: n for name, n in ran.items() if name in COUNTED - ({"quantize"} if calls else set())}
    assert counts == {name: n for name, n in due.items() if not (calls and name == "quantize")}


@pytest.mark.compiler
def test_steps_of_shipped_policies_and_their_reasons() -> None:
    def steps(policy: str, **changes: Any) -> dict[str, Step]:
        return steps_of(first_program(policy), replace(TRAINING, **changes))

    tetrajet = steps("tetrajet")
    for step in (tetrajet["fprop.input"], tetrajet["fprop.weight"]):
        assert (step.asked, step.keeps) == (Asked.BYTES, {Keeps.BYTES})
    assert all(tetrajet[name].asked is Asked.FROM_BYTES for name in ("dgrad.weight", "wgrad.input"))
    qema = steps("tetrajet-qema")["fprop.weight"]
    assert (qema.by, qema.why) == ("tensor code", "q_ema rounds elements")
    nvfp4 = steps("nvfp4-te")
    scaled = nvfp4["fprop.input"]
    assert scaled.by == nvfp4["wgrad.grad_output"].by == "a kernel, scales by tensor code"
    assert (scaled.why, scaled.keeps) == ("tensor_scaling divides by a scale of groups", {Keeps.ORIGINAL})
    off = steps("tetrajet", machine=Machine("cpu", "they are off"))
    assert {step.kernel for step in off.values()} == {TENSOR_CODE}
    assert off["fprop.input"].why == "they are off"
    gpu = steps("nvfp4", machine=Machine("cuda"), drawn=True)
    assert gpu["dgrad.grad_output"].asked is gpu["wgrad.grad_output"].asked is Asked.BOTH
    whole = steps("int4-per-tensor", machine=Machine("cuda"))
    # No bytes stand for blocks of a tensor, but the backward keeps no bytes of dY.
    assert whole["dgrad.grad_output"].asked is Asked.BOTH
    kept = gpu["fprop.input"]
    assert (kept.asked, kept.keeps) == (Asked.BOTH, {Keeps.READY})
    assert [kept.saves_original(ready=ready) for ready in (True, False)] == [False, True]
    observed = steps("nvfp4", machine=Machine("cuda"), observed=True)["fprop.input"]
    assert observed.asked is not Asked.BOTH
    assert observed.keeps == {Keeps.ORIGINAL}


@pytest.mark.compiler
@pytest.mark.parametrize("rereads", [True, False])
def test_weights_of_experts_are_quantized_within_the_product(rereads: bool) -> None:
    operands = {"dgrad.weight": {"source": "fprop"}} if rereads else None
    program = program_of(one_rule(op="grouped", operands=operands), "grouped", WIDTH, HIDDEN)
    experts = replace(TRAINING, experts=True)
    steps = steps_of(program, experts)
    assert [name for name, step in steps.items() if step.in_product] == ["fprop.weight", "dgrad.weight"]
    asked = [steps[name].asked for name in ("fprop.weight", "dgrad.weight")]
    assert asked == ([Asked.BYTES, Asked.FROM_BYTES] if rereads else [Asked.VALUES] * 2)
    off = steps_of(program, replace(experts, machine=Machine("cpu", "they are off")))
    assert {step.kernel for step in off.values()} == {TENSOR_CODE}


@pytest.mark.captured
@pytest.mark.compiler
def test_a_kernel_quantizes_the_operand_that_a_technique_has_split() -> None:
    policy = one_rule({"outlier_clamp": {"operands": ["fprop.input"]}}, quantize=NVFP4)
    model = torch.nn.Linear(64, 64)
    explained = fp4graph.explain(model, policy, (torch.randn(32, 64, requires_grad=True),))
    step = explained.sites[0].schedule.steps()[Operand.FPROP_INPUT]  # type: ignore[union-attr]
    assert (step.by, step.why) == ("a kernel, within tensor code", "outlier_clamp splits the operand")
    fp4graph.apply(model, policy, backend="eager")
    x = torch.randn(32, 64, requires_grad=True)
    model(x)
    assert operators_of(lambda: model(x).sum().backward())["quantize"] == 6


@pytest.mark.captured
def test_the_schedule_of_a_model_without_quantized_sites_says_so() -> None:
    explained = fp4graph.explain(torch.nn.Sequential(torch.nn.Linear(8, 8)), "nvfp4-te", (torch.randn(2, 8),))
    assert explained.quantized == 0
    assert explained.problem is not None
    text = explained.schedule()
    assert "nothing is quantized" in text
    assert f"problem: {explained.problem}" in text


def test_nothing_is_kept_for_gradients_that_are_not_needed() -> None:
    neither = lower(first_program("tetrajet"), replace(TRAINING, needs=(False, False)))
    assert (neither.dgrad, neither.wgrad) == (None, None)
    assert not neither.fprop.left.keeps | neither.fprop.right.keeps
    of_weight = lower(first_program("tetrajet"), replace(TRAINING, needs=(False, True)))
    assert of_weight.dgrad is None
    assert (of_weight.fprop.left.keeps, of_weight.fprop.right.keeps) == ({Keeps.BYTES}, set())


def test_a_schedule_is_made_once_and_prints_its_reasons() -> None:
    program = first_program("tetrajet-qema")
    schedule = lower(program, TRAINING)
    assert lower(program, replace(TRAINING)) is schedule
    lines = str(schedule).splitlines()
    assert len(lines) == 7
    assert lines[6] == "fprop, dgrad, wgrad: multiplied in the dtype of the model"
    assert lines[1] == "fprop.weight: tensor code (q_ema rounds elements); keeps quantized values"


@pytest.mark.compiler
def test_channels_apart_and_reused_operands_are_printed() -> None:
    program = first_program(one_rule({"out_control": {"mode": "split"}}, quantize=NVFP4))
    schedule = lower(program, TRAINING)
    assert schedule.apart is not None
    lines = str(schedule).splitlines()
    assert len(lines) == len(schedule.steps()) + len(schedule.apart.steps()) + 2
    assert any(line.startswith("wgrad.input of channels apart: ") for line in lines)
    data = schedule.to_json()
    assert data["apart"] == schedule.apart.to_json()
    assert data["multiply"] == dict.fromkeys(Gemm, "in the dtype of the model")
    assert set(data["apart"]["multiply"]) == {"fprop", "wgrad"}
    reused = lower(first_program("wang-dge"), TRAINING).steps()[Operand.DGRAD_WEIGHT]
    assert (reused.by, reused.why) == ("high precision", "it is the dequantized operand of fprop")


#: The attributes that say what kernels support. A file that reads one of them decides about kernels.
ASKS = {
    *("unknown", "unrounded", "unpacked", "refuses", "concerns"),
    *("available", "multiplies", "multiplies_bfloat16", "lacks"),
}
CHOOSES = {"chosen", "of_spec"}


def asked_by(file: Path) -> set[str]:
    """Return the names of ``CHOOSES`` that ``file`` imports from kernels, and the attributes of ``ASKS`` that it reads
    if it imports anything from kernels."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    imported = [node for node in nodes if isinstance(node, ast.ImportFrom) and "kernels" in (node.module or "")]
    known = {alias.name for node in imported for alias in node.names}
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    return known & CHOOSES | (read & ASKS if known else set())


@pytest.mark.slow
def test_only_lowering_asks_what_kernels_support() -> None:
    package = Path(fp4graph.__file__).parent
    files = [file for file in package.rglob("*.py") if "kernels" not in file.relative_to(package).parts]
    asking = {file.relative_to(package).as_posix() for file in files if asked_by(file)}
    # ops/facts.py lowers single quantizers for callers outside of products. The census prints what GPUs lack. Frozen
    # weights are packed only if an operator unpacks them.
    assert asking == {"ops/lower.py", "ops/facts.py", "model/census.py", "exports/frozen.py"}
