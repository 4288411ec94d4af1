"""The schedule of a product names the operators that then run, for every shipped policy, and its reasons are true."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fp4graph_policies
import pytest
import torch

import fp4graph
from benchmarks.bits import HIDDEN, KINDS, TOKENS, WIDTH, Blocks
from fp4graph.graph.plan import plan_site
from fp4graph.ops.code import Machine
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.ops.lower import lower
from fp4graph.ops.operand import OperandProgram
from fp4graph.ops.schedule import Keeps, Schedule, Setting, Step, Way
from fp4graph.technique.operands import Gemm, Operand
from fp4graph.technique.site import BlockPosition, SiteView
from tests.helpers.policies import NVFP4, long_but_few, one_rule

POLICIES = sorted(file.stem for file in Path(fp4graph_policies.__file__).parent.glob("*.yaml"))
#: The stages of techniques that call the quantizer as often as they like.
SEVERAL = ("around", "observe", "element_surrogate", "scale_surrogate", "statistic_gradient", "group_gradient")
FP32 = torch.float32
#: A training step of an fp32 model on a CPU with kernels.
TRAINING = Setting(Machine("cpu", True), (FP32, FP32), FP32, (True, True), drawn=True)


def operators_of(call: Callable[[], object]) -> Counter[str]:
    """Return how often each operator of this project runs in ``call``."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = (event.name.partition("::") for event in profile.events())
    return Counter(name for space, _, name in names if space == "fp4graph")


#: The operator that quantizes an operand in each way, once; from bytes another.
OPERATOR = {
    Way.KERNEL: "quantize",
    Way.WITHIN: "quantize",
    Way.GIVEN: "quantize",
    Way.PACKS: "quantize_and_pack",
    Way.BYTES: "requantize",
    Way.PLACES: "quantize_at",
    Way.PRODUCT: "quantized_product",
}
FROM_BYTES = {Way.PLACES: "requantize_at", Way.PRODUCT: "requantized_product"}
COUNTED = {*OPERATOR.values(), *FROM_BYTES.values()}


def steps(schedule: Schedule) -> Iterator[Step]:
    for gemm in (schedule.fprop, schedule.dgrad, schedule.wgrad):
        if gemm is not None:
            yield from (gemm.left, gemm.right)


def operands(program: MatmulProgram) -> list[OperandProgram]:
    return [side for gemm in (program.fprop, program.dgrad, program.wgrad) for side in (gemm.left, gemm.right)]


def first_program(policy: str) -> MatmulProgram:
    """Return the program of a linear layer in the middle of a stack of blocks."""
    document = fp4graph.load_policy(policy)
    site = SiteView("blocks.1.mlp.up", "linear", WIDTH, HIDDEN, WIDTH * HIDDEN, BlockPosition("blocks", 1, 3))
    rule = document.decide(site).rule
    program = plan_site(site, rule).program
    assert program is not None
    return program


def expected(schedule: Schedule) -> Counter[str]:
    """Return how often each operator that quantizes runs; without those inside of techniques that call a quantizer."""
    return Counter(
        (FROM_BYTES if step.why == "from bytes" else OPERATOR)[step.way]
        for step in steps(schedule)
        if step.way in OPERATOR
    )


def lowered(monkeypatch: pytest.MonkeyPatch) -> list[tuple[MatmulProgram, Setting, Schedule]]:
    """Return a list that is filled with what is lowered from now on."""
    seen: list[tuple[MatmulProgram, Setting, Schedule]] = []

    def spy(program: MatmulProgram, setting: Setting) -> Schedule:
        schedule = lower(program, setting)
        seen.append((program, setting, schedule))
        return schedule

    for module in ("matmul", "parted"):
        monkeypatch.setattr(f"fp4graph.ops.{module}.lower", spy)
    return seen


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
        assert kind == "experts"
        return
    assert bool(seen) == fp4graph.load_policy(policy).quantizes
    due = sum((expected(schedule) for _, _, schedule in seen), Counter[str]())
    # What calls the quantizer a number of times of its own: techniques around it, observers, surrogates.
    calls = any(operand.at(stage) for program, _, _ in seen for operand in operands(program) for stage in SEVERAL)
    counts = {name: n for name, n in ran.items() if name in COUNTED - ({"quantize"} if calls else set())}
    assert counts == {name: n for name, n in due.items() if not (calls and name == "quantize")}


@pytest.mark.compiler
def test_reasons_name_what_stands_in_the_way() -> None:
    def reasons(policy: str, **changes: Any) -> dict[str, Step]:
        program = first_program(policy)
        schedule = lower(program, replace(TRAINING, **changes))
        return {f"{gemm}.{side}": getattr(getattr(schedule, gemm), side) for gemm in Gemm for side in ("left", "right")}

    tetrajet = reasons("tetrajet")
    assert all(
        step.way is Way.PACKS and step.keeps == {Keeps.BYTES} for name, step in tetrajet.items() if "fprop" in name
    )
    assert all(tetrajet[name].way is Way.BYTES for name in ("dgrad.right", "wgrad.right"))
    qema = reasons("tetrajet-qema")["fprop.right"]
    assert (qema.way, qema.why) == (Way.TENSOR, "q_ema rounds elements")
    nvfp4 = reasons("nvfp4-te")
    assert nvfp4["fprop.left"] == Step(Way.GIVEN, "tensor_scaling divides by a scale of groups", {Keeps.ORIGINAL})
    assert nvfp4["wgrad.left"].way is Way.GIVEN
    off = reasons("tetrajet", machine=Machine("cpu", False))
    assert {step.way for step in off.values()} == {Way.TENSOR}
    assert off["fprop.left"].why == "no kernels are used on this cpu"
    gpu = reasons("nvfp4", machine=Machine("cuda", True), drawn=True)
    assert gpu["dgrad.left"].way is gpu["wgrad.left"].way is Way.BOTH
    seen = reasons("nvfp4", machine=Machine("cuda", True), observed=True)
    assert seen["fprop.left"].way is not Way.BOTH
    assert seen["fprop.left"].keeps == {Keeps.ORIGINAL}


@pytest.mark.compiler
def test_a_kernel_runs_within_what_a_technique_does_around_it() -> None:
    policy = one_rule({"outlier_clamp": {"operands": ["fprop.input"]}}, quantize=NVFP4)
    model = torch.nn.Linear(64, 64)
    explained = fp4graph.explain(model, policy, (torch.randn(32, 64, requires_grad=True),))
    step = explained.sites[0].schedule.steps()[Operand.FPROP_INPUT]  # type: ignore[union-attr]
    assert (step.way, step.why) == (Way.WITHIN, "outlier_clamp splits the operand")
    fp4graph.apply(model, policy, backend="eager")
    x = torch.randn(32, 64, requires_grad=True)
    model(x)
    assert operators_of(lambda: model(x).sum().backward())["quantize"] == 6


def test_a_schedule_of_nothing_says_so() -> None:
    explained = fp4graph.explain(torch.nn.Sequential(torch.nn.Linear(8, 8)), "nvfp4-te", (torch.randn(2, 8),))
    assert explained.quantized == 0
    assert explained.problem is not None
    text = explained.schedule()
    assert "nothing is quantized" in text
    assert f"problem: {explained.problem}" in text


def test_no_gradient_nothing_kept() -> None:
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
    assert len(lines) == 6
    assert lines[1] == "fprop.weight: tensor code (q_ema rounds elements); keeps quantized values"


#: The package's functions that say what kernels can do. Whoever asks them decides about kernels.
ASKS = {
    *("usable", "unserved", "unrounded", "unpacked", "unread_both", "serves", "supports", "unsupported", "runs"),
    *("packs", "available", "on_cpu", "multiplies", "multiplies_bfloat16"),
}


def test_only_lowering_asks_what_kernels_can_do() -> None:
    package = Path(fp4graph.__file__).parent
    asking = {}
    for path in package.rglob("*.py"):
        calls = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("operators", "cpu", "gpu", "experts")
            and node.attr in ASKS
        }
        if calls and path.parent.name != "kernels":
            asking[path.relative_to(package).as_posix()] = calls
    # The census prints what GPUs lack.
    assert set(asking) == {"ops/code.py", "ops/lower.py", "model/census.py"}
