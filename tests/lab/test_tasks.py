"""Tasks: recipes as the paper prints them, a training of every family, and problems against their definitions."""

import math
from functools import partial
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import fp4graph
from fp4graph.errors import Error
from fp4graph.lab.data import images as sources
from fp4graph.lab.data.loading import Order
from fp4graph.lab.runs.train import Run, train
from fp4graph.lab.tasks import TASKS, countdown, language, placed, regression, task_named
from tests.helpers.policies import MXFP4, one_rule

pytestmark = pytest.mark.usefixtures("operation_by_operation")

#: "Elucidating the design space of FP4 training", appendix, Table 11: batch, accumulation, lr, epochs, tokens, context;
#: and the whole steps that the tokens fill: 0.9e9 in steps of 4096 · 128 are 1716.6, and so on.
TABLE_11 = {
    "gaussian": (4096, 1, 1e-2, 20, None, None, None),
    **dict.fromkeys(("mnist", "cifar10", "imagenet100", "small-diffusion"), (512, 1, 1e-3, 20, None, None, None)),
    "big-diffusion": (20, 1, 1e-4, 3, None, None, None),
    "llama-9m": (4096, 1, 1e-3, None, 0.9e9, 128, 1717),
    "llama-60m": (128, 1, 1e-4, None, 6e9, 512, 91_553),
    "llama-350m": (16, 8, 1e-4, None, 14.7e9, 1024, 112_153),
    "llama-1b": (4, 512, 1e-4, None, 42e9, 1024, 20_028),
}


def settings(task, **options):
    return task_named(task).settings(Run(task, device="cpu", **options))


@pytest.fixture(autouse=True)
def _forget_data():
    yield
    language.tokens_of.cache_clear()


@pytest.mark.parametrize("name", TABLE_11)
def test_the_recipes_are_table_11(name):
    task, (*row, context, steps) = TASKS[name], TABLE_11[name]
    recipe = task.recipe
    assert [recipe.batch_size, recipe.accumulate, recipe.lr, recipe.epochs, recipe.tokens] == row
    assert (recipe.steps, recipe.optimizer, recipe.schedule, recipe.weight_decay) == (None, "adam", "constant", 0.0)
    if context:
        assert task.make.args[1] == context
        assert settings(name).total_steps(SimpleNamespace(tokens_per_sample=context, samples=1)) == steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "quantized", "sites"),
    [
        ("gaussian", 1, 1),
        ("digits", 8, 12),
        pytest.param("digits-diffusion", 24, 54, marks=pytest.mark.long),
        pytest.param("text", 14, 17, marks=pytest.mark.long),
        # Captured, since captures of rollouts must add no sites.
        pytest.param("countdown", 14, 17, marks=[pytest.mark.long, pytest.mark.captured]),
    ],
)
def test_every_family_trains_without_a_download(task, quantized, sites):
    short = {"steps": 2, "validate_every": 1, "validation_batches": 1, "device": "cpu"}
    outcome = train(Run(task, policy="mxfp4", batch_size=None if task == "gaussian" else 8, **short))
    assert (outcome.quantized, outcome.sites, outcome.diverged) == (quantized, sites, False)
    assert math.isfinite(outcome.validation_loss)
    assert [entry.step for entry in outcome.history] == [1, 2]
    assert outcome.history[0].validation_loss != outcome.validation_loss


def test_batches_are_a_function_of_seed_and_number_and_every_pass_goes_through_all_samples_once():
    whole = list(islice(Order(10, 4, seed=3).rows(), 8))
    assert all(len(batch) == 4 for _, batch in whole)
    seen = torch.cat([batch for _, batch in whole[:5]])
    assert seen[:10].sort().values.tolist() == seen[10:].sort().values.tolist() == list(range(10))
    assert seen[:10].tolist() != seen[10:].tolist()
    for start in range(8):
        key, rows = next(Order(10, 4, seed=3).rows(start))
        assert key == whole[start][0] == start
        assert torch.equal(rows, whole[start][1])
    assert not torch.equal(next(Order(10, 4, seed=4).rows())[1], whole[0][1])
    with pytest.raises(Error, match="batch size 11 exceeds the 10 training samples"):
        Order(10, 11, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gaussian", "digits", "digits-diffusion", "text", "countdown"])
def test_data_and_model_are_functions_of_the_seed_from_any_batch(task):
    small = {"gaussian": partial(regression.Gaussian, samples=100, features=4),
             "countdown": partial(countdown.Countdown, warm_up=0, group=4)}  # fmt: skip
    make = small.get(task, TASKS[task].make)
    problem, again, other = (make(settings(task, batch_size=8, seed=seed)) for seed in (5, 5, 6))
    whole = list(islice(problem.batches(0), 4))
    for batch, same in zip(whole[2:], islice(again.batches(2), 2), strict=True):
        assert all(map(torch.equal, batch, same))
    assert not any(map(torch.equal, whole[0], whole[1]))
    assert not torch.equal(whole[0][0], next(other.batches(0))[0])
    weights = [[*each.model.parameters()] for each in (problem, again, other)]
    assert all(map(torch.equal, *weights[:2]))
    assert not all(map(torch.equal, *weights[1:]))


def test_gaussian_loss_is_the_squared_distance_of_the_weights():
    """Σ(w - w')² in expectation: for standard normal X, Var of the mean of n squared errors is 2Σ²/n."""
    problem = regression.Gaussian(settings("gaussian", batch_size=500, dtype="fp32"), samples=20_000, features=32)
    assert problem.samples == 18_000
    x, y = problem.x, problem.y
    assert [x.mean(), x.std()] == pytest.approx([0, 1], abs=0.01)
    w = torch.linalg.lstsq(x[:18_000], y[:18_000]).solution  # the data has no noise: this is w
    model = nn.Linear(32, 1)
    model.weight.data = w.T + 0.5
    model.bias.data.zero_()
    losses = torch.cat([problem.measure(model, batch)["loss"] for batch in problem.validation()])
    assert len(losses) == 2000
    assert losses.mean().item() == pytest.approx(32 * 0.25, rel=4 * math.sqrt(2 / 2000))
    model.weight.data = w.T
    assert all((problem.measure(model, batch)["loss"] < 1e-6).all() for batch in problem.validation())
    assert torch.allclose(problem.w, w, atol=1e-4)


def test_digits_are_scikits_scans_normalized():
    from sklearn.datasets import load_digits

    problem = TASKS["digits"].make(settings("digits", batch_size=64))
    batches = list(problem.validation())
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    assert (images.shape, problem.samples) == ((360, 1, 8, 8), 1437)
    assert [images.mean(), images.std()] == pytest.approx([0, 1], abs=0.05)
    scans = load_digits()
    rows = sources.digits().validation.indices
    assert np.allclose(images[:, 0] * 0.376 + 0.305, scans.images[rows] / 16, atol=1 / 500)
    assert labels.tolist() == scans.target[rows].tolist()


def test_classification_measures_each_image():
    problem = TASKS["digits"].make(settings("digits", batch_size=4))
    logits = 100 * nn.functional.one_hot(torch.tensor([0, 1, 2, 3]), 10).float()
    measured = problem.measure(lambda images: logits, (torch.zeros(4, 1, 8, 8), torch.tensor([0, 1, 2, 4])))
    assert measured["accuracy"].tolist() == [1, 1, 1, 0]
    assert measured["loss"].tolist() == pytest.approx([0, 0, 0, 100], abs=1e-4)


@pytest.fixture
def denoising():
    return TASKS["digits-diffusion"].make(settings("digits-diffusion", batch_size=16))


@pytest.mark.slow
def test_diffusion_noises_as_ddpm_does(denoising):
    """√ᾱ·x + √(1 - ᾱ)·ε; ᾱ is the product of 1 - β, and β is linear from 1e-4 to 0.02 (Ho et al. 2020)."""
    kept = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000))
    images, noise, timesteps = batch = next(denoising.batches(0))
    expected = [math.sqrt(kept[t]) * x + math.sqrt(1 - kept[t]) * e for x, e, t in zip(*batch, strict=True)]

    def answer(noisy, timesteps, return_dict):
        assert torch.allclose(noisy, torch.stack(expected), atol=1e-5)
        return (torch.zeros_like(noisy),)

    loss = denoising.measure(answer, batch)["loss"]
    assert torch.allclose(loss, noise.square().flatten(1).mean(1))
    assert -1 <= images.min() < images.max() <= 1
    assert noise.std() == pytest.approx(1, abs=0.1)
    assert len(timesteps.unique()) > 8

    _, noise, _ = batch = next(denoising.validation())  # the noise itself is the solution
    assert not denoising.measure(lambda *_, **__: (noise,), batch)["loss"].any()
    assert torch.equal(next(denoising.validation())[1], noise)  # validation is the same each time
    assert not torch.equal(next(denoising.batches(1))[1], next(denoising.batches(2))[1])


@pytest.mark.slow
def test_the_big_u_net_is_that_of_the_tutorial(tmp_path, monkeypatch):
    from PIL import Image

    for number in range(50):
        Image.new("RGB", (4, 4)).save(tmp_path / f"{number}.png")
    with torch.device("meta"):
        problem = TASKS["big-diffusion"].make(settings("big-diffusion", data=str(tmp_path)))
    assert sum(parameter.numel() for parameter in problem.model.parameters()) == 113_673_219
    assert len(problem.blocks) == 13


@pytest.mark.slow
def test_language_loss_is_the_models_own():
    problem = TASKS["text"].make(settings("text", batch_size=4))
    (ids,) = batch = next(problem.batches(0))
    with torch.no_grad():
        expected = problem.model(input_ids=ids, labels=ids).loss
        losses = problem.measure(problem.model, batch)["loss"]
    assert losses.shape == (4,)
    assert losses.mean().item() == pytest.approx(expected.item(), rel=1e-6)
    assert problem.summary({"loss": 2.0}) == {"perplexity": pytest.approx(math.exp(2))}


@pytest.mark.parametrize(
    ("size", "parameters"),
    [("tiny", 133_440), ("9m", 8_995_968), ("60m", 58_073_600), ("350m", 367_969_280), ("1b", 1_339_082_752)],
)
def test_llamas_have_about_as_many_parameters_as_their_names_say(size, parameters, monkeypatch):
    tokens = language.Parts(np.zeros(5000, np.uint32), np.zeros(5000, np.uint32))
    monkeypatch.setattr(language, "tokens_of", lambda *_: tokens)
    with torch.device("meta"):
        problem = language.Language(size, 128, settings("text"))
    assert sum(parameter.numel() for parameter in problem.model.parameters()) == parameters


def test_a_tokenizer_is_trained_on_the_text_once_and_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4GRAPH_DATA", str(tmp_path / "kept"))
    texts = language.Parts(["one two three " * 500], ["two one three " * 50])
    first = language.prepared(texts, 300)
    (folder,) = (tmp_path / "kept" / "tokens").iterdir()
    monkeypatch.setattr(language, "train_tokenizer", lambda *_: pytest.fail("the tokenizer was kept"))
    second = language.prepared(texts, 300)
    assert np.array_equal(first.train, second.train)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(first.validation[:-1].tolist()) == texts.validation[0]


@pytest.mark.captured
@pytest.mark.long
def test_the_blocks_of_a_u_net_are_all_its_levels(denoising):
    """Every linear of every level is quantized, and neither the time embedding before them nor a convolution is."""
    policy = placed(fp4graph.load_policy("mxfp4"), denoising.blocks)
    images = torch.zeros(2, 1, 8, 8)
    sites = fp4graph.explain(denoising.model, policy, (images, torch.zeros(2, dtype=torch.int64))).sites
    quantized = {site.module for site in sites if site.quantized}
    linears = {name for name, module in denoising.model.named_modules() if isinstance(module, nn.Linear)}
    assert quantized == {name for name in linears if not name.startswith("time_embedding")}
    assert any(name.startswith("mid_block.") for name in quantized)


def test_rules_on_blocks_become_rules_on_the_modules_of_the_given_blocks_in_phases_too():
    rules = [
        {"name": "first", "match": {"op": "linear", "first_blocks": 1}, "keep": "sensitive"},
        {"name": "ends", "match": {"op": "linear", "last_blocks": 2, "block": True}, "keep": "sensitive"},
        {"name": "rest", "match": {"op": "linear", "block": True}, "quantize": MXFP4},
    ]
    phase = {"at": 5, "rules": rules[2:]}
    policy = fp4graph.load_policy({"version": 1, "default": "keep", "rules": rules, "phases": [phase]})
    result = placed(policy, ["a.0", "mid", "b.0"])
    assert [rule.match.module for rule in result.rules] == [("a.0.*",), ("mid.*", "b.0.*"), ("a.0.*", "mid.*", "b.0.*")]
    assert all(rule.match.block is None and rule.match.op == ("linear",) for rule in result.rules)
    assert result.phases[0].policy.rules[0].match.module == ("a.0.*", "mid.*", "b.0.*")
    assert result.rules[2].specs == policy.rules[2].specs
    nowhere = {"name": "both", "match": {"first_blocks": 1, "last_blocks": 1}, "keep": "sensitive"}
    policy = fp4graph.load_policy({"version": 1, "rules": [{**nowhere, "required": False}, rules[2]]})
    result = placed(policy, ["a.0", "mid", "b.0"])
    assert [rule.name for rule in result.rules] == ["rest"]
    assert fp4graph.load_policy(yaml.safe_load(result.to_yaml())).rules == result.rules
    with pytest.raises(fp4graph.PolicyError, match=r"rule 'both': no block is both .* this task's 3 blocks"):
        placed(fp4graph.load_policy({"version": 1, "rules": [nowhere, rules[2]]}), ["a.0", "mid", "b.0"])
    head = fp4graph.load_policy(one_rule(match={"block": False}, default="keep"))
    with pytest.raises(fp4graph.PolicyError, match=r"rule 'all': .*neither block: false"):
        placed(head, ["a.0"])


@pytest.mark.captured
@pytest.mark.slow
@pytest.mark.parametrize("policy", ["nvfp4", "mxfp4"])
def test_a_regression_or_an_mlp_is_one_block(policy):
    """``block: true`` is the whole of a model without repeated blocks, its last layer included."""
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    for model, inputs, quantized in ((nn.Sequential(nn.Linear(1024, 1)), 1024, 1), (mlp, 64, 2)):
        explanation = fp4graph.explain(model, policy, (torch.zeros(32, inputs),))
        assert (explanation.quantized, explanation.problem) == (quantized, None)


def test_every_family_has_a_task_with_embedded_data():
    families = {"regression", "classification", "diffusion", "language", "reinforcement"}
    for tasks in (TASKS.values(), (task for task in TASKS.values() if task.embedded)):
        assert {task.family for task in tasks} == families
