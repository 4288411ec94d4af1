"""examples/rl_grpo.py: its policies, tokens and server, bad input, and a training with its table and record."""

import json
import math
import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml

import fp4graph
from fp4graph.lab.tasks import countdown

pytest.importorskip("trl", reason="needs fp4graph[clients]")

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl_grpo.py"


@pytest.fixture(autouse=True)
def _threads():
    """Restore the number of threads, which the example sets."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def names():
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.slow
def test_each_part_of_mxfp4_rl_is_one_of_its_techniques(names):
    """Options are those of mxfp4-rl; over the 75 steps of the run its noise falls in ten stages."""
    whole = fp4graph.load_policy(names["policy_of"]("mxfp4-rl", 75))
    assert [technique.name for technique in whole.techniques] == list(names["PARTS"])
    for part, technique in zip(names["PARTS"], whole.techniques, strict=True):
        policy = fp4graph.load_policy(names["policy_of"](part, 75))
        assert policy.techniques == (technique,)
        assert policy.rules[0].specs == whole.rules[0].specs
        assert policy.name == part
    assert whole.techniques[2].steps_per_stage == 8  # type: ignore[attr-defined]
    assert fp4graph.load_policy(names["policy_of"]("bf16", 75)).techniques == ()


def test_the_tokenizer_has_the_tasks_tokens(names):
    made = names["tokenizer"]()
    assert made(countdown.CHARACTERS)["input_ids"] == countdown.encode([countdown.CHARACTERS])[0].tolist()
    assert made.decode([*made("7+5-3")["input_ids"], countdown.END, countdown.PAD], skip_special_tokens=True) == "7+5-3"


def test_bad_input_is_an_error_before_anything_runs(example, tmp_path):
    with pytest.raises(SystemExit) as ended:
        example("rl_grpo.py", "--policies=mxfp5", f"--output={tmp_path / 'rl'}")
    assert re.search("did you mean the shipped policy 'mxfp", str(ended.value))
    with pytest.raises(SystemExit, match=r"--server serves bf16, .*; got 'mxfp4'"):
        example("rl_grpo.py", "--server", "--policies=mxfp4", f"--output={tmp_path / 'rl'}")
    assert not (tmp_path / "rl").exists()


def test_a_server_quantizes_tokens_as_the_policy_does(names):
    """To the bit: multiplied with an identity, a token is its quantized self. Tokens have many magnitudes and zeros."""
    identity = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.eye_(identity.weight)
    policy = yaml.safe_load(fp4graph.load_policy("nvfp4-rl").to_yaml())
    policy["rules"][0] |= {"match": {"op": "linear"}, "operands": {"fprop.weight": "keep", "backward": "keep"}}
    policy["techniques"] = [
        {name: {**options, "operands": ["fprop.input"]} for name, options in entry.items()}
        for entry in policy["techniques"]
    ]
    policy["techniques"][0]["tensor_scaling"].pop("share")
    fp4graph.apply(identity, policy, backend="eager").eval()
    x = torch.randn(256, 64) * 2.0 ** torch.randint(-8, 8, (256, 1)) * (torch.rand(256, 64) < 0.7)
    x[0] = 0
    assert torch.equal(identity(x), names["by_rows"](x))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:vllm .* warns about:fp4graph.PolicyWarning")  # that siblings differ
@pytest.mark.parametrize("policy", ["nvfp4-w4a16", "nvfp4-rl"])
def test_a_server_generates_with_what_the_trainer_multiplies(names, policy):
    """Probabilities agree up to the order of sums where siblings share scales, and differ where they do not."""
    largest = {}
    for name in (policy, policy + names["UNSHARED"]):
        seen = []
        options = {"steps": 3, "prompts": 4, "start": 30, "server": True}
        names["train"](names["policy_of"](name, 3), 0, lambda step, loss, *, kl, seen=seen: seen.append(kl), **options)
        largest[name] = max(seen)
        assert len(seen) == 3
    shared, unshared = largest.values()
    assert shared < 1e-6 < 1e-4 < unshared  # a rounding that flips moves one token's probabilities


@pytest.mark.long
def test_a_reward_that_is_nan_ends_the_training(names, monkeypatch):
    monkeypatch.setattr(countdown, "reward", lambda prompt, completion: math.nan)
    monkeypatch.setitem(names["train"].__globals__, "held_out", lambda *_: {"reward": 0.0})
    with pytest.raises(fp4graph.Error, match="returned nan for the completion"):
        names["train"]("bf16", 0, lambda *_: None, steps=1, prompts=2, start=1)


@pytest.mark.long
def test_the_reward_rises_under_every_policy(example, tmp_path):
    """About two minutes on an idle core."""
    arguments = ["--seeds=1", "--steps=60", "--prompts=24", "--jobs=1", f"--output={tmp_path}"]
    printed = example("rl_grpo.py", "--policies=mxfp4,mxfp4-rl", *arguments)
    lines = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    runs = {line["policy"]: line for line in lines if line.get("kind") == "run"}
    assert list(runs) == ["bf16", "mxfp4", "mxfp4-rl"]
    for policy, run in runs.items():
        assert re.search(rf"^ {policy} .* {run['loss']:.4g} ", printed, re.MULTILINE)
        losses = [loss for _, loss in run["curve"]]
        assert len(losses) == 60
        assert sum(losses[-15:]) < sum(losses[:15])
        assert run["metrics"]["reward"] == pytest.approx(1 - run["loss"], abs=1e-6)
        assert run["metrics"]["reward"] > run["metrics"]["start"]
        assert 0 < run["metrics"]["entropy"] < math.log(countdown.VOCABULARY)
    # The same command reuses the runs that have ended and checks no policy again; other options are refused.
    notes = re.compile(r"^policy .* was not checked before the training.*\n", re.MULTILINE)
    assert example("rl_grpo.py", "--policies=mxfp4,mxfp4-rl", *arguments) == notes.sub("", printed)
    with pytest.raises(SystemExit, match=r"holds a comparison of .*60.*; give another folder"):
        example("rl_grpo.py", "--policies=mxfp4", *arguments, "--steps=90")
