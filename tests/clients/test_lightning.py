"""Lightning: a policy on the module or on its net, with checkpoints, resumption and averages of weights."""

import pytest
import torch
from torch.nn.functional import cross_entropy

import fp4graph
from fp4graph.errors import Error
from fp4graph.model.runtime import runtime_of
from fp4graph.training.origin import Mismatch
from tests.helpers import models
from tests.helpers.steps import descend
from tests.helpers.training import prepared

pytest.importorskip("lightning", reason="needs fp4graph[clients]")
import lightning
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from fp4graph.integrations import FP4GraphLightningCallback

GENERATOR = torch.Generator().manual_seed(1)
IMAGES, LABELS = torch.randn(16, 3, 32, 32, generator=GENERATOR), torch.randint(0, 10, (16,), generator=GENERATOR)
BATCHES = list(zip(IMAGES.split(4), LABELS.split(4), strict=True))


class Classifier(lightning.LightningModule):
    def __init__(self, applied=None, policy="tetrajet"):
        super().__init__()
        self.net = models.vit()
        self.applied = [self if applied == "module" else self.net] if applied else []
        for part in self.applied:
            fp4graph.apply(part, policy, backend="eager")
        self.losses, self.validated = [], []

    def training_step(self, batch, index):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        loss = cross_entropy(self.net(batch[0]), batch[1])
        self.validated.append(loss.item())
        self.log("loss", loss)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        for part in self.applied:
            fp4graph.prepare_optimizer(part, optimizer)
        return optimizer


def fitted(module, folder, epochs=2, callbacks=(), resume=None, accumulate=1):
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IMAGES, LABELS), batch_size=4)
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=epochs, accumulate_grad_batches=accumulate,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1), *callbacks],
    )  # fmt: skip
    trainer.fit(module, data, data, ckpt_path=resume)
    return module


@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
@pytest.mark.parametrize("applied", ["module", "net"])
def test_fit_and_resume(applied, policy, tmp_path, products, policy_warnings):
    whole = fitted(Classifier(applied, policy), tmp_path)
    assert len(whole.losses) == 8
    assert sum(whole.losses[4:]) < sum(whole.losses[:4])
    assert len(products) == 2 * 4
    assert runtime_of(whole.applied[0]).count == 8
    # Lightning calls training_step, not the module.
    assert len(policy_warnings()) == (1 if applied == "module" else 0)
    plain = fitted(Classifier(), tmp_path / "plain")
    assert whole.losses != plain.losses
    assert whole.losses == pytest.approx(plain.losses, rel=0.2)
    by_hand = fp4graph.apply(models.vit(), policy, backend="eager")
    outputs = (cross_entropy(by_hand(images), labels) for images, labels in BATCHES)
    same = 4 if applied == "net" else 1  # noise depends on the names of modules
    assert descend(outputs.__next__, prepared(by_hand), 4)[:same] == whole.losses[:same]

    resumed = fitted(Classifier(applied, policy), tmp_path / "again", resume=tmp_path / "epoch=0.ckpt")
    assert resumed.losses == whole.losses[4:]
    state = torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)["state_dict"]
    Classifier().load_state_dict(state if policy == "tetrajet" else fp4graph.strip(state), strict=True)


@pytest.mark.parametrize("applied", ["module", "net"])
@pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")
def test_an_average_of_weights_is_validated_under_the_policy(applied, tmp_path, products):
    module = fitted(Classifier(applied), tmp_path, callbacks=[EMAWeightAveraging(decay=0.5)])
    plain = Classifier()
    plain.load_state_dict(torch.load(tmp_path / "epoch=1.ckpt", weights_only=False)["state_dict"], strict=True)
    assert len(module.validated) == 2 + 2 * 4
    assert min(products.values()) == max(products.values()) == 8 + len(module.validated)
    fp4graph.apply(plain.net if applied == "net" else plain, "tetrajet", backend="eager").eval()
    with torch.no_grad():
        assert [cross_entropy(plain.net(x), y).item() for x, y in BATCHES] == module.validated[-4:]


def by_callback(policy="tetrajet-qema", part="net"):
    return FP4GraphLightningCallback(policy, part, backend="eager")


def test_a_callback_trains_and_resumes_as_two_lines_do(tmp_path):
    expected = fitted(Classifier("net", "tetrajet-qema"), tmp_path / "lines")
    module = fitted(Classifier(), tmp_path, callbacks=[by_callback(part=None)])
    assert module.losses == expected.losses
    resumed = fitted(Classifier(), tmp_path, callbacks=[by_callback()], resume=tmp_path / "epoch=0.ckpt")
    assert resumed.losses == expected.losses[4:]
    fitted(Classifier(), tmp_path / "other", epochs=1, callbacks=[by_callback("mxfp4")])
    with pytest.raises(Mismatch, match="was written under policy 'mxfp4', this model has 'tetrajet'"):
        fitted(Classifier(), tmp_path, callbacks=[by_callback("tetrajet")], resume=tmp_path / "other/epoch=0.ckpt")


def test_techniques_that_act_on_gradients_train(tmp_path):
    """Lightning computes gradients in the closure of the optimizer's step."""
    by_hand = fp4graph.apply(models.vit(), "nvfp4-qad-lsq", backend="eager")
    outputs = (cross_entropy(by_hand(images), labels) for images, labels in BATCHES)
    expected = descend(outputs.__next__, prepared(by_hand), 4)
    assert fitted(Classifier(), tmp_path, epochs=1, callbacks=[by_callback("nvfp4-qad-lsq")]).losses == expected


LINEARS = {"version": 1, "name": "linears", "rules": [{"match": {}, "quantize": {"element": "e2m1", "block": 32}}]}


def test_a_callback_refuses_what_it_cannot_do_and_knows_the_length_of_the_training(tmp_path):
    fitted(Classifier(), tmp_path, epochs=1)
    with pytest.raises(Mismatch, match="was written under no policy"):
        fitted(Classifier(), tmp_path, callbacks=[by_callback("tetrajet")], resume=tmp_path / "epoch=0.ckpt")
    with pytest.raises(Error, match="precision='16-mixed'"):
        fitted(Classifier(), tmp_path, callbacks=[by_callback(LINEARS | {"techniques": ["loss_scaling"]})])
    phased = LINEARS | {"phases": [{"at": 0.5, "rules": [], "default": "keep"}]}
    folder = tmp_path / "phased"
    module = fitted(Classifier(), folder, callbacks=[by_callback(phased)], accumulate=3)  # four batches in an epoch
    assert runtime_of(module.net).settings.total_forwards == runtime_of(module.net).count == 8
    resume = {"resume": folder / "epoch=0.ckpt", "accumulate": 3}
    fitted(Classifier(), folder, callbacks=[by_callback(phased)], **resume)
    with pytest.raises(Mismatch, match="was written for a training of 8 forwards, this one has 12"):
        fitted(Classifier(), folder, callbacks=[by_callback(phased)], epochs=3, **resume)
    module, callback = Classifier(), by_callback(phased)
    fitted(module, folder, callbacks=[callback], **resume)
    fitted(module, folder, callbacks=[callback], epochs=3, accumulate=3)  # resumes from nothing


class Two(Classifier):
    """Has a second optimizer, of a part outside of the net."""

    def __init__(self):
        super().__init__()
        self.other = torch.nn.Linear(10, 10)
        self.automatic_optimization = False

    def training_step(self, batch, index):
        self.manual_backward(self.other(self.net(batch[0])).square().mean())
        for optimizer in self.optimizers():
            optimizer.step()

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (self.net, self.other)]


def test_a_callback_prepares_the_optimizers_of_the_part(tmp_path):
    module = fitted(Two(), tmp_path, epochs=1, callbacks=[by_callback()])
    net = module.net.state_dict()
    assert any(not torch.equal(net[key], net[key.replace("_fp4graph_q_ema_", "")]) for key in net if "q_ema" in key)


def test_a_callback_needs_the_name_of_the_part_if_there_are_several(tmp_path):
    module = Classifier()
    module.other = torch.nn.Linear(2, 2)
    with pytest.raises(Error, match="has the parts net, other; give the one to quantize"):
        fitted(module, tmp_path, callbacks=[by_callback(part=None)])
    with pytest.raises(Error, match="has no part 'nett' with parameters; it has net, other"):
        fitted(module, tmp_path, callbacks=[by_callback(part="nett")])
