"""examples/rl_grpo.py: its policies and bad input at once; GRPO in two minutes, with its table and record."""

from __future__ import annotations

import json
import math
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp4graph
from fp4graph.lab.data import countdown

pytest.importorskip("trl", reason="needs fp4graph[clients]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_grpo.py"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow
def test_the_parts_of_mxfp4_rl_are_its_own(names: dict[str, Any]) -> None:
    """Each has one technique with the options of mxfp4-rl; the noise falls in ten stages over the run."""
    whole = fp4graph.load_policy(names["policy_of"]("mxfp4-rl", 75))
    assert [technique.name for technique in whole.techniques] == list(names["PARTS"])
    for part, technique in zip(names["PARTS"], whole.techniques, strict=True):
        policy = fp4graph.load_policy(names["policy_of"](part, 75))
        assert policy.techniques == (technique,)
        assert policy.rules[0].specs == whole.rules[0].specs
        assert policy.name == part
    assert whole.techniques[2].steps_per_stage == 8  # type: ignore[attr-defined]
    assert fp4graph.load_policy(names["policy_of"]("bf16", 75)).techniques == ()


def test_the_tokenizer_has_the_tasks_tokens(names: dict[str, Any]) -> None:
    made = names["tokenizer"]()
    assert made(countdown.CHARACTERS)["input_ids"] == countdown.encode([countdown.CHARACTERS])[0].tolist()
    assert made.decode([*made("7+5-3")["input_ids"], countdown.END, countdown.PAD], skip_special_tokens=True) == "7+5-3"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--completion=30"],
            r"a rollout of 39 tokens .* is longer than the key-value cache: the model has 32 positions",
        ),
        (["--policies=mxfp5"], "did you mean the shipped policy 'mxfp4'"),
    ],
)
def test_bad_input_is_an_error_before_anything_runs(
    arguments: list[str], says: str, example: Callable[..., str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        example("rl_grpo.py", *arguments, f"--output={tmp_path / 'rl'}")
    assert re.search(says, str(ended.value))
    assert not (tmp_path / "rl").exists()


def test_runs_of_a_policy_that_has_changed_are_not_taken_over(names: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    text = fp4graph.load_policy("mxfp4").to_yaml()
    file.write_text(text)
    arguments = names["parse"]([f"--policies=bf16,{file}", "--seeds=2", f"--output={tmp_path}"])
    everything, missing = names["wanted"](arguments)
    assert [(Path(policy).stem, seed) for policy, seed, _ in missing] == [
        ("bf16", 0), ("own", 0), ("bf16", 1), ("own", 1)
    ]  # fmt: skip
    for policy, _, result in everything:
        settings = names["settings_of"](arguments, names["policy_of"](policy, arguments.steps))
        result.write_text(json.dumps({"settings": settings}))
    assert names["wanted"](arguments) == (everything, [])
    file.write_text("# a comment changes nothing\n" + text)
    assert names["wanted"](arguments) == (everything, [])
    file.write_text(fp4graph.load_policy("mxfp4-full").to_yaml())
    with pytest.raises(fp4graph.Error, match=r"own-0\.json holds a run with another policy; give the same, or another"):
        names["wanted"](arguments)


def test_two_policies_of_one_name_are_refused(names: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "mxfp4.yaml"
    file.write_text(fp4graph.load_policy("nvfp4").to_yaml())
    with pytest.raises(fp4graph.Error, match=r"policies mxfp4 and \S+mxfp4\.yaml would share the files mxfp4-\*\.json"):
        names["wanted"](names["parse"]([f"--policies=mxfp4,{file}", f"--output={tmp_path}"]))


@pytest.mark.long
def test_a_reward_that_is_nan_ends_the_training(
    names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(countdown, "reward", lambda prompt, completion: math.nan)
    arguments = names["parse"](["--steps=1", "--start=1", "--prompts=2", "--generations=2", f"--output={tmp_path}"])
    monkeypatch.setitem(names["run"].__globals__, "held_out_reward", lambda *_: 0.0)
    with pytest.raises(fp4graph.Error, match="returned nan for the completion"):
        names["run"]("bf16", 0, arguments, tmp_path / "bf16-0.json")
    assert not list(tmp_path.glob("*.json"))


@pytest.mark.long
def test_the_reward_rises_under_every_policy(example: Callable[..., str], tmp_path: Path) -> None:
    """About two minutes on an idle core."""
    threads = torch.get_num_threads()
    arguments = ["--seeds=1", "--steps=60", "--prompts=24", "--held-out=128", "--jobs=1", f"--output={tmp_path}"]
    try:
        printed = example("rl_grpo.py", "--policies=bf16,mxfp4,mxfp4-rl", *arguments)
    finally:
        torch.set_num_threads(threads)
    heading, _, *rows = printed.strip().splitlines()
    columns = [cell.strip() for cell in heading.strip("|").split("|")]
    found = {
        cells[0]: dict(zip(columns, cells, strict=True))
        for cells in ([c.strip() for c in row.strip("|").split("|")] for row in rows)
    }
    assert list(found) == ["bf16", "mxfp4", "mxfp4-rl"]
    for policy, row in found.items():
        record = json.loads((tmp_path / f"{policy}-0.json").read_text())
        assert row["end"] == f"{record['held_out']:.3f}"
        history = record["reward_history"]
        assert len(history) == 60
        assert sum(history[-15:]) > sum(history[:15])
        assert 0 < record["entropy"] < math.log(countdown.VOCABULARY)
        # Under mxfp4 another order of sums flips a rounding of a few tokens; in mxfp4-rl other blocks fall back.
        assert record["kl"] < {"bf16": 1e-9, "mxfp4": 1e-4, "mxfp4-rl": 0.1}[policy]
        if policy == "bf16":
            assert record["gradient_error"] < 1e-9
            assert row["error of dY, %"] == "-"
        else:
            assert 1e-3 < record["gradient_error"] < 2
            assert 0 < record["dy_scale_bias"] < record["dy_total"] * 5
    # The runs that have ended are taken over, and runs with other options are not mixed with them.
    assert example("rl_grpo.py", "--policies=bf16,mxfp4,mxfp4-rl", *arguments) == printed
    with pytest.raises(SystemExit, match="holds a run with another steps; give the same, or another --output"):
        example("rl_grpo.py", "--policies=bf16", *arguments, "--steps=90")
