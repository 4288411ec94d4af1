"""The calls of timm's train.py, validate.py and avg_checkpoints.py."""

import copy
from argparse import Namespace

import pytest
import torch
from timm.models import load_checkpoint, load_state_dict, resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import CheckpointSaver, ModelEmaV3, NativeScaler, distribute_bn, unwrap_model
from torch.nn.functional import cross_entropy

import fp4graph
from fp4graph.model.runtime import runtime_of
from tests.helpers.models import vit
from tests.helpers.steps import same

LOADER = [
    (torch.randn(4, 3, 32, 32, generator=g), torch.randint(0, 10, (4,), generator=g))
    for g in (torch.Generator().manual_seed(seed) for seed in range(3))
]


def train(folder, policy, epochs, *, resume="", ema=True, torchcompile=True):
    """Train as train.py with ``--model-ema --torchcompile``, and the two lines of ``fp4graph``."""
    folder.mkdir(exist_ok=True)
    model = fp4graph.apply(vit(), policy, backend="eager")
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2)
    fp4graph.prepare_optimizer(model, optimizer)
    start = resume_checkpoint(model, resume, optimizer=optimizer) if resume else 0
    model_ema = ModelEmaV3(model, decay=0.5) if ema else None
    if resume and ema:
        load_checkpoint(model_ema.module, resume, use_ema=True)
    run, run_ema = model, model_ema
    if torchcompile:
        run = torch.compile(model, backend="eager")
        run_ema = torch.compile(model_ema, backend="eager") if ema else None
    scheduler, _ = create_scheduler_v2(optimizer, sched="cosine", num_epochs=4)
    if start:
        scheduler.step(start)
    folders = {"checkpoint_dir": folder, "recovery_dir": folder}
    saver = CheckpointSaver(model, optimizer, Namespace(model="vit"), model_ema=model_ema, **folders)
    losses, evaluated = [], []
    for epoch in range(start or 0, epochs):
        run.train()
        for images, target in LOADER:
            loss = cross_entropy(run(images), target)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if model_ema is not None:
                model_ema.update(model)
            losses.append(loss.item())
        distribute_bn(model, 1, False)
        if run_ema is not None:
            run_ema.eval()
            with torch.no_grad():
                evaluated.append(cross_entropy(run_ema(LOADER[0][0]), LOADER[0][1]).item())
        saver.save_checkpoint(epoch, metric=losses[-1])
        scheduler.step(epoch + 1)
    return model, losses, evaluated


@pytest.mark.parametrize("policy", ["tetrajet", "tetrajet-qema"])
def test_train_resume_validate(policy, tmp_path, products, policy_warnings):
    model, losses, evaluated = train(tmp_path / "a", policy, 2)
    assert losses[-1] < losses[0]
    assert len(products) == 2 * 4
    assert set(products.values()) == {2 * 3 + 2}  # training, and an evaluation of the average in each epoch
    assert runtime_of(model).count == 6
    bare, others, _ = train(tmp_path / "b", policy, 2, ema=False, torchcompile=False)
    assert losses == others  # average and outer compilation change nothing
    assert same(model.parameters(), bare.parameters())
    assert not policy_warnings()

    train(tmp_path / "c", policy, 1)
    resumed, rest, tested = train(tmp_path / "c", policy, 2, resume=str(tmp_path / "c" / "last.pth.tar"))
    assert rest == losses[3:]
    assert same(model.parameters(), resumed.parameters())
    assert tested == evaluated[1:]

    plain, last = vit(), str(tmp_path / "a" / "last.pth.tar")
    if policy == "tetrajet":  # validate.py, strictly
        for use_ema in (False, True):
            load_checkpoint(plain, last, use_ema=use_ema, strict=True)
        fp4graph.apply(plain, policy, backend="eager").eval()
        with torch.no_grad():
            assert cross_entropy(plain(LOADER[0][0]), LOADER[0][1]).item() == evaluated[-1]
    else:
        plain.load_state_dict(fp4graph.strip(load_state_dict(last, use_ema=True)), strict=True)

    one, other = (load_state_dict(str(file)) for file in (tmp_path / "b").glob("checkpoint-*.pth.tar"))
    average = {name: ((one[name].double() + other[name].double()) / 2).float() for name in one}  # avg_checkpoints.py
    vit().load_state_dict(average if policy == "tetrajet" else fp4graph.strip(average), strict=True)


def test_amp_and_blocks_that_are_unfrozen_one_by_one(products):
    """``--amp`` of train.py is autocast and a scaler."""
    model = fp4graph.apply(vit(), "tetrajet", backend="eager")
    optimizer = fp4graph.prepare_optimizer(model, create_optimizer_v2(model, opt="sgd", lr=0.1))
    scaler = NativeScaler(device="cpu")
    for frozen in (2, 1, 0):
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index >= frozen)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(model(LOADER[0][0]), LOADER[0][1])
        optimizer.zero_grad()
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    assert set(products.values()) == {3}
    assert copy.deepcopy(unwrap_model(ModelEmaV3(model))) is not None
