"""A training loop on Accelerate, with the one line that applies a policy."""

import itertools
import json

import pytest
import torch

import fp4graph
from fp4graph.model.runtime import runtime_of

pytest.importorskip("accelerate", reason="install fp4graph[hf]")
pytest.importorskip("transformers", reason="install fp4graph[hf]")

import accelerate

from fp4graph.integrations import apply_with_accelerate
from tests.helpers.policies import one_rule
from tests.helpers.steps import differences

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_accelerator():
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def loop(llama, counting):
    """Return a function that makes a loop: (accelerator, model, train); ``train(steps)`` returns the losses."""

    def make(policy="tetrajet-qema", *, precision="no", **options):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        apply_with_accelerate(accelerator, model, optimizer, policy, backend="eager", **options)  # the added line
        data = torch.utils.data.DataLoader(counting, batch_size=8)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)

        def train(steps):
            losses = []
            for batch in itertools.islice(data, steps):
                losses.append(model(**batch).loss)
                accelerator.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
            return [loss.item() for loss in losses]

        return accelerator, model, train

    return make


@pytest.mark.parametrize("precision", [pytest.param("no", marks=pytest.mark.long), "bf16"])
def test_a_loop_trains_and_resumes_to_the_last_bit(loop, tmp_path, precision):
    accelerator, model, train = loop(precision=precision)
    first = train(3)
    accelerator.save_state(str(tmp_path / "state"))
    last = train(3)
    assert last[-1] < first[0]
    runtime = runtime_of(accelerator.unwrap_model(model))
    assert len({site.module for site in runtime.sites if site.quantized}) == 14
    assert json.loads((tmp_path / "state" / "fp4graph.json").read_text())["seed"] == 0

    accelerator, again, train = loop(precision=precision)
    accelerator.load_state(str(tmp_path / "state"))
    assert runtime_of(again).root_state.count == 3
    assert train(3) == last
    assert not differences(dict(model.state_dict()), dict(again.state_dict()))


@pytest.mark.long
def test_the_state_of_another_policy_is_refused_unless_allowed(loop, tmp_path):
    accelerator, _, train = loop("tetrajet")
    train(1)
    accelerator.save_state(str(tmp_path / "state"))
    accelerator, _, _ = loop("microscaling")
    with pytest.raises(fp4graph.Error, match=r"the state in .*state was written under policy 'tetrajet'"):
        accelerator.load_state(str(tmp_path / "state"))
    accelerator, _, train = loop("microscaling", same_policy=False)
    accelerator.load_state(str(tmp_path / "state"))
    train(1)


def test_a_prepared_model_or_optimizer_is_refused(llama):
    accelerator = accelerate.Accelerator(cpu=True)
    model = llama()
    prepared, wrapped = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for arguments in ((prepared, wrapped), (llama(), wrapped)):
        with pytest.raises(fp4graph.Error, match=r"before accelerator\.prepare\(\)"):
            apply_with_accelerate(accelerator, *arguments, "tetrajet")


def test_a_scaled_loss_is_unscaled_before_gradients_are_clipped():
    norms = []
    for techniques in ([], [{"loss_scaling": {"init_scale": 1024.0}}]):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, (model, x) = accelerate.Accelerator(cpu=True), (torch.nn.Linear(32, 32), torch.ones(4, 32))
        model.load_state_dict({"weight": torch.eye(32), "bias": torch.zeros(32)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        apply_with_accelerate(accelerator, model, optimizer, one_rule(techniques=techniques), backend="eager")
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(x).square().sum())
        norms.append(accelerator.clip_grad_norm_([model.weight], 1.0))
        norms.append(accelerator.clip_grad_norm_([model.bias], 1.0))
        optimizer.step()
        norms.append((model.weight - torch.eye(32)).norm())
    assert torch.allclose(torch.stack(norms[:3]), torch.stack(norms[3:]))


def test_each_of_two_models_has_its_policy_in_a_saved_state(tmp_path):
    accelerator = accelerate.Accelerator(cpu=True)
    models = [torch.nn.Linear(32, 32) for _ in range(2)]
    for model, policy in zip(models, (one_rule(), "bf16"), strict=True):
        optimizer = torch.optim.SGD(model.parameters())
        apply_with_accelerate(accelerator, model, optimizer, policy, backend="eager")
    accelerator.prepare(*models)
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))  # refuses no policy
    fp4graph.apply(models[1], one_rule(), backend="eager")
    with pytest.raises(fp4graph.Error, match="written under policy 'bf16'"):
        accelerator.load_state(str(tmp_path))
