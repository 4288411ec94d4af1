"""Trainers that ``compare`` runs, and the losses that they log."""

import pytest
import torch

pytest.importorskip("lightning", reason="needs fp4graph[clients]")
import lightning

import fp4graph
from fp4graph.integrations import runs


class ByHand(lightning.LightningModule):
    """Optimizes by hand, and returns a loss at every other step."""

    def __init__(self):
        super().__init__()
        self.net, self.automatic_optimization = torch.nn.Linear(32, 1), False

    def training_step(self, batch, index):
        self.manual_backward(loss := self.net(batch[0]).square().mean())
        self.optimizers().step()
        return {"loss": loss.detach()} if index % 2 else None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 32)), batch_size=2)


class Log:
    def __init__(self):
        self.points, self.ticks = [], []

    def __call__(self, step, loss):
        self.points.append((step, float(loss)))

    def tick(self, step):
        self.ticks.append(step)


def test_a_lightning_step_without_a_loss_is_a_step():
    options = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer, log = lightning.Trainer(accelerator="cpu", max_epochs=1, **options), Log()
    assert runs.run((trainer, ByHand()), fp4graph.load_policy("bf16"), 0, log) is None
    assert log.ticks == [1, 3]
    assert [step for step, _ in log.points] == [2, 4]
