"""The task countdown: puzzles, rollouts, advantages and gradients against references, bad rewards, and resuming."""

import dataclasses
from collections import defaultdict
from contextlib import contextmanager
from functools import partial
from itertools import permutations, product

import numpy as np
import pytest
import torch

import fp4graph
from fp4graph.errors import Error
from fp4graph.lab.runs.train import Run, train
from fp4graph.lab.tasks import TASKS, countdown
from fp4graph.model.runtime import runtime_of
from tests.lab.trainings import stop_at

#: All expressions of three digits and two signs, with their values.
EXPRESSIONS = {
    text: eval(text)
    for text in (f"{a}{s}{b}{t}{c}" for a, s, b, t, c in product("123456789", "+-", "123456789", "+-", "123456789"))
}


def digits(text):
    return tuple(sorted(int(character) for character in text if character.isdigit()))


def test_an_answer_solves_exactly_the_puzzle_of_its_digits_and_value():
    solving = {text for text, value in EXPRESSIONS.items() if digits(text) == (3, 5, 7) and value == 9}
    rewarded = {text for text in EXPRESSIONS if countdown.reward("7,3,5=09:", text)}
    assert rewarded == solving == {"7+5-3", "5+7-3", "7-3+5", "5-3+7"}

    wrong = "", "9", "+7+5-3", "7+5-3+", "7+5--3", "75-3", "7+5-3=", "7 +5-3", "4+5", "9+3-3", "7+5-3-0", "7+5-3\n"
    assert [countdown.reward("3,5,7=09:", text) for text in ("7+5-3", *wrong)] == [1.0] + [0.0] * len(wrong)


def test_puzzles_have_answers_and_are_functions_of_their_arguments():
    drawn = countdown.puzzles(500, 3, 4)
    for prompt, answer in drawn:
        numbers, target = prompt.split("=")
        assert (f"{EXPRESSIONS[answer]:02d}:", digits(answer)) == (target, digits(numbers))
        assert (len(prompt), len(answer) + 1) == (countdown.PROMPT, countdown.ANSWER)
    assert drawn == countdown.puzzles(500, 3, 4)
    assert drawn[:20] != countdown.puzzles(20, 3, 5)
    assert len({prompt for prompt, _ in drawn}) > 300
    with pytest.raises(Error, match="'3,5=9:' is not a countdown prompt; write"):
        countdown.reward("3,5=9:", "")


def test_no_held_out_set_of_numbers_is_trained_on():
    kept, held_out = (set(countdown.sets(held_out=out)) for out in (False, True))
    assert not kept & held_out
    assert (len(kept) + len(held_out), len(held_out)) == (165, 33)  # ways to choose 3 of 9 digits with repetition
    for out, allowed in ((False, kept), (True, held_out)):
        assert {digits(text.split("=")[0]) for text in countdown.prompts(300, 0, held_out=out)} <= allowed


def test_an_epoch_counts_every_prompt_once():
    totals = defaultdict(set)
    for text, value in EXPRESSIONS.items():
        if value >= 0:
            totals[digits(text)].add(value)
    prompts = (len(set(permutations(numbers))) * len(totals[numbers]) for numbers in countdown.sets(held_out=False))
    assert sum(prompts) == countdown.DIFFERENT


def test_texts_go_through_tokens_and_back():
    texts = [countdown.CHARACTERS, countdown.CHARACTERS[::-1]]
    tokens = countdown.encode(texts)
    assert sorted(tokens[0].tolist()) == list(range(countdown.FIRST, countdown.VOCABULARY))
    assert [countdown.decode(row) for row in tokens.tolist()] == texts
    assert {countdown.decode([2, 3, stop, 4]) for stop in (countdown.PAD, countdown.END)} == {"01"}


def make_problem(**options):
    """Make the problem without a supervised start."""
    settings = TASKS["countdown"].settings(Run("countdown", device="cpu", batch_size=2, seed=3))
    return countdown.Countdown(settings, **{"warm_up": 0, "group": 4, **options})


def by_length(prompt, completion):
    """Reward the length, because an untrained model solves hardly any puzzle."""
    return float(len(completion) % 3)


def scores(model, prompt, tokens):
    """Return the logits that predict each of ``tokens``, each by a separate forward without a cache."""
    return [
        model(input_ids=torch.cat([prompt, torch.tensor(tokens[:place], dtype=torch.int64)])[None], use_cache=False)
        .logits[0, -1]
        for place in range(len(tokens))
    ]  # fmt: skip


def grouped(problem):
    """Return the first batch with each prompt repeated for its four completions."""
    prompts, noise = next(problem.batches(0))
    return prompts.repeat_interleave(4, 0), noise.flatten(0, 1)


def until_end(tokens):
    return tokens[: tokens.index(countdown.END) + 1] if countdown.END in tokens else tokens


def test_advantages_are_normalised_in_each_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 1.0]])
    r = rewards.numpy().astype(np.float64)
    expected = (r - r.mean(1, keepdims=True)) / (r.std(1, ddof=1, keepdims=True) + 1e-4)
    assert np.allclose(countdown.advantages(rewards), expected, atol=1e-6)
    assert not countdown.advantages(rewards)[1].any()


@pytest.mark.slow
def test_a_rollout_takes_the_argmax_of_logits_plus_noise():
    problem = make_problem()
    prompts, noise = grouped(problem)
    noise[:, :, countdown.END] += 2  # so that some completions end early
    frozen = problem.model.model.layers[0].eval()
    tokens, logits = countdown.rollout(problem.model, prompts, noise)
    entropy = countdown.mean_entropy(logits, countdown.before_end(tokens))
    assert problem.model.training
    assert not any(module.training for module in frozen.modules())
    assert tokens.shape == (8, problem.completion)
    lengths = set()
    for prompt, row_noise, row, row_entropy in zip(prompts, noise, tokens.tolist(), entropy, strict=True):
        kept = until_end(row)
        lengths.add(len(kept))
        assert set(row[len(kept) :]) <= {countdown.PAD}
        with torch.no_grad():
            logits = scores(problem.model, prompt, kept)
        assert kept == [int((scored + drawn).argmax()) for scored, drawn in zip(logits, row_noise, strict=False)]
        p = torch.stack(logits).double().softmax(-1).numpy()
        assert row_entropy.item() == pytest.approx(-(p * np.log(p)).sum(-1).mean(), rel=1e-5)
    assert len(lengths) > 1


def test_the_noise_draws_from_the_softmax():
    """Frequencies of argmax(logits + noise) within 4 standard deviations of softmax(logits)."""
    problem = make_problem(group=64)
    noise = torch.cat([batch[1] for batch, _ in zip(problem.batches(0), range(8), strict=False)]).flatten(0, 2)
    logits = torch.linspace(-1, 2, countdown.VOCABULARY)
    drawn = np.bincount((logits + noise).argmax(-1).numpy(), minlength=countdown.VOCABULARY) / len(noise)
    p = np.exp(logits.double().numpy())
    p /= p.sum()
    assert (abs(drawn - p) < 4 * np.sqrt(p * (1 - p) / len(noise))).all()


@pytest.mark.slow
def test_the_gradient_is_that_of_the_objective_written_out():
    """−(1/G)·Σ A·(1/|o|)·Σ log p, by single completions and tokens. The value of the loss is 1 − mean reward."""
    problem = make_problem(reward=by_length)
    model, batch = problem.model.train(), next(problem.batches(5))
    losses = problem.measure(model, batch)["loss"]
    assert model.training
    losses.mean().backward()
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()

    prompts, noise = batch
    objective = torch.zeros((), dtype=torch.float64)
    for place, (prompt, prompt_noise) in enumerate(zip(prompts, noise, strict=True)):
        tokens, _ = countdown.rollout(model, prompt.expand(4, -1), prompt_noise)
        rows = [until_end(row) for row in tokens.tolist()]
        rewards = np.array([len(countdown.decode(row)) % 3 for row in rows], dtype=np.float64)
        assert losses[place].item() == pytest.approx(1 - rewards.mean())
        weights = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        for row, weight in zip(rows, weights, strict=True):
            logits = scores(model, prompt, row)
            logs = [each.double().log_softmax(-1)[token] for each, token in zip(logits, row, strict=True)]
            objective = objective - weight * torch.stack(logs).mean() / 4 / len(prompts)
    objective.backward()
    assert any(gradient.any() for gradient in found.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_validation_is_the_expected_reward_and_the_same_each_time():
    problem = make_problem(reward=by_length)
    model = problem.model.eval()
    batches = list(problem.validation())
    assert sum(len(prompts) for prompts, _ in batches) == countdown.VALIDATED
    texts = [countdown.decode(row) for prompts, _ in batches for row in prompts.tolist()]
    numbers = {tuple(sorted(map(int, text.split("=")[0].split(",")))) for text in texts}
    assert numbers <= set(countdown.sets(held_out=True))
    with torch.no_grad():
        found = problem.measure(model, batches[0])
        again = make_problem(reward=by_length).measure(model, next(problem.validation()))
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert torch.allclose(found["loss"], 1 - found["reward"])
    assert (set(found), model.training) == ({"loss", "reward", "entropy"}, False)


@pytest.mark.parametrize("batch_size", [1, 48])
def test_validation_puzzles_are_distinct_and_the_same_for_every_batch_size(batch_size):
    problem = make_problem()
    expected = [torch.cat(parts) for parts in zip(*problem.validation(), strict=True)]
    assert len({tuple(prompt) for prompt in expected[0].tolist()}) == countdown.VALIDATED == 128
    problem.batch_size = batch_size
    batches = list(problem.validation())
    assert [len(prompts) for prompts, _ in batches] == ([1] * 128 if batch_size == 1 else [48, 48, 32])
    assert all(map(torch.equal, (torch.cat(parts) for parts in zip(*batches, strict=True)), expected))


@pytest.mark.slow
def test_the_supervised_start_is_a_function_of_the_seed_and_lowers_the_loss():
    start = countdown.started.__wrapped__  # not the cached one
    first, again, other = (start(seed, 2).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert sum(p.numel() for p in start(0, 0).parameters()) == 108_992

    def loss(steps):
        prompts, answers = map(countdown.encode, zip(*countdown.puzzles(32, 9), strict=True))
        chosen, _ = countdown.log_probs(start(0, steps), prompts, answers)
        return -chosen.mean().item()

    assert loss(10) < loss(0) - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_reward_that_is_not_finite_raises_an_error_that_names_it(value):
    def broken(prompt, completion):
        return float(value) if completion != "1+1" else 0.0

    with pytest.raises(Error, match=rf"broken returned {value} for the completion '1\+2' of the prompt '1,2=03:'"):
        countdown.rewards_of(broken, ["1,1=02:", "1,2=03:"], ["1+1", "1+2"])
    problem = make_problem(reward=broken)
    with pytest.raises(Error, match=f"the reward function .*broken returned {value} for the completion"):
        problem.measure(problem.model.train(), next(problem.batches(0)))


def test_a_rollout_longer_than_the_cache_is_an_error_before_anything_runs():
    message = r"a rollout of 33 tokens \(a prompt of 9, a completion of up to 24\) is longer .* completion to 23 tokens"
    with pytest.raises(Error, match=message):
        make_problem(completion=24)
    assert make_problem(completion=23).completion == 23


@pytest.mark.long
def test_a_resumed_run_equals_the_whole_run_to_the_bit(tmp_path, monkeypatch):
    """The policy is mxfp4-rl: its noise depends on the count of training forwards, in rollouts too."""
    make = partial(countdown.Countdown, warm_up=3, group=4, reward=by_length)
    monkeypatch.setitem(TASKS, "countdown", dataclasses.replace(countdown.COUNTDOWN, make=make))
    chosen = Run(
        "countdown", policy="mxfp4-rl", device="cpu", steps=6, batch_size=4, validate_every=2, validation_batches=1
    )
    counts = []

    @contextmanager
    def watch(model, optimizer):
        yield
        counts.append(runtime_of(model).count)

    whole = train(chosen, watch=watch)
    with pytest.raises(KeyboardInterrupt):
        train(chosen, directory=tmp_path, report=stop_at(4))
    resumed = train(chosen, directory=tmp_path, resume=True, watch=watch)
    assert resumed.history == whole.history
    assert counts == [6, 6]  # rollouts and validations are not counted
    assert len({entry.train_loss for entry in whole.history}) > 1


@pytest.mark.long
def test_rollouts_under_a_policy_have_the_trainers_probabilities():
    """Under mxfp4, and under adaptive noise: a rollout draws the same noise as the training forward after it."""
    problem = make_problem(warm_up=20)
    prompts, noise = grouped(problem)
    data = {"version": 1, "extends": "mxfp4-full", "techniques": [
        {"adaptive_quantization_noise": {"sigma_start": 0.01, "sigma_end": 0.001, "stages": 2, "steps_per_stage": 9,
                                         "rollout": True}}]}  # fmt: skip
    for policy in ("mxfp4", data):
        model = fp4graph.apply(countdown.started.__wrapped__(3, 0), policy, backend="eager", seed=1)
        model.load_state_dict(problem.model.state_dict())
        tokens, logits = countdown.rollout(model, prompts, noise)
        longest = logits.shape[1]
        sampled = logits.log_softmax(-1).gather(-1, tokens[:, :longest, None])[..., 0]
        chosen, mask = countdown.log_probs(model.train(), prompts, tokens)
        assert ((chosen[:, :longest] - sampled).abs() * mask[:, :longest]).max() < 1e-4
