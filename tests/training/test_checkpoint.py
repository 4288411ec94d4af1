"""Checkpoints: a kill cannot ruin them, training goes on bit for bit, and what does not fit is said."""

from __future__ import annotations

import copy
import enum
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import fp4graph
from fp4graph.training import checkpoint, sealed
from tests.helpers.processes import python, run, run_ranks

KILLED = Path(__file__).with_name("killed.py")
KILLS = 20


def alike(left: Any, right: Any) -> bool:
    """Equal in structure and to the last bit."""
    if isinstance(left, torch.Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        return same and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(alike(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(alike, left, right))
    return bool(left == right)


@pytest.mark.long
@pytest.mark.process
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    deaths = json.loads(run(python(KILLED, tmp_path, str(KILLS)), env={"OMP_NUM_THREADS": "1"}))
    assert len(deaths) == KILLS
    assert all(death["killed"] for death in deaths)
    steps = [death["steps"] for death in deaths]
    assert steps == sorted(set(steps)), "a checkpoint went back"
    assert all(death["left_half_a_file"] for death in deaths[1::2])  # those that were in the middle of a save
    whole, killed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "killed"))
    assert len(whole["progress"]["losses"]) > max(steps)
    assert alike(whole, killed)
    assert not alike(whole, {**killed, "model": {**killed["model"], "0.bias": killed["model"]["0.bias"] + 1e-8}})


@pytest.fixture
def made() -> Callable[..., tuple[nn.Module, torch.optim.Optimizer]]:
    """Makes a model under a policy (None for a plain one) and its optimizer."""

    def make(
        policy: Any = "tetrajet-qema", width: int = 64, seed: int | None = None, steps: int = 0
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
        if policy is not None:
            fp4graph.apply(model, policy, backend="eager", seed=seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        if policy is not None:
            fp4graph.prepare_optimizer(model, optimizer)
        for _ in range(steps):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    return make


def test_everything_comes_back(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    model, optimizer = made(steps=3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    optimizer.step()
    scheduler.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    progress = {"step": 3, "loss": np.float32(0.5), "history": [1.0, (2, None)], "best": torch.tensor([7])}
    checkpoint.save(file, model, optimizer, scaler=scaler, scheduler=scheduler, progress=progress)
    drawn = (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())

    other, its = made()
    its_scheduler, its_scaler = torch.optim.lr_scheduler.StepLR(its, 2), torch.amp.GradScaler("cpu")
    back = checkpoint.load(file, other, its, scaler=its_scaler, scheduler=its_scheduler)
    assert back.pop("best").tolist() == [7]
    assert back == {"step": 3, "loss": 0.5, "history": [1.0, (2, None)]}
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == drawn
    assert alike(dict(model.state_dict()), dict(other.state_dict()))
    assert int(dict(other.named_buffers())["_fp4graph_forwards"]) == 3
    assert alike(optimizer.state_dict(), its.state_dict())
    assert its_scheduler.last_epoch == 1
    assert its_scaler.get_scale() == scaler.get_scale() == 8.0
    assert checkpoint.read_summary(file).policy == fp4graph.load_policy("tetrajet-qema").to_yaml()
    assert checkpoint.read_summary(file).progress["step"] == 3


@pytest.mark.slow
def test_looking_at_a_model_leaves_the_random_state(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    model, optimizer = made(steps=1)
    checkpoint.save(file, model, optimizer)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    other, _ = made()
    torch.manual_seed(5)
    checkpoint.load(file, other)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_cut_off_file_is_an_error_that_names_it(made: Any, tmp_path: Path, share: float) -> None:
    file = tmp_path / "run.pt"
    model, optimizer = made(steps=1)
    checkpoint.save(file, model, optimizer)
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    before = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with pytest.raises(fp4graph.Error, match=r"run\.pt cannot be read as tensors and plain data: it is truncated"):
        checkpoint.load(file, model, optimizer)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items() if key in before)


class Kept:
    """A model with all that a checkpoint restores, and a look at whether any of it has changed."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def states(self) -> Any:
        parts = self.model, self.optimizer, self.scheduler, self.scaler
        generators = torch.get_rng_state(), hash(random.getstate()), hash(str(np.random.get_state()))
        return copy.deepcopy([dict(part.state_dict()) for part in parts]), generators

    def save(self, file: Path) -> None:
        checkpoint.save(
            file, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler, progress={"step": 1}
        )

    def load(self, file: Path) -> None:
        checkpoint.load(file, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler)


@pytest.mark.slow
def test_two_hundred_bit_flips_load_nothing(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    Kept(*made(steps=2)).save(file)
    content, chance = file.read_bytes(), random.Random(9)
    kept = Kept(*made(steps=1))
    before = kept.states()
    ends = range(len(content) - 110, len(content))  # the archive's last record, the mark and the digest
    for number in range(200):
        damaged = bytearray(content)
        for _ in range(chance.choice([1, 1, 4, 64])):
            place = chance.choice(ends) if number % 4 == 0 else chance.randrange(len(content))
            damaged[place] ^= 1 << chance.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(fp4graph.Error, match=r"run\.pt"):
            kept.load(file)
        assert alike(list(kept.states()), list(before)), number
    file.write_bytes(content)
    kept.load(file)


def edits(content: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Every entry of a checkpoint dropped, and with a value of another kind: (its name, the change, the content)."""
    wrong: dict[type, list[Any]] = {int: ["x"], float: ["x", None], str: [5], dict: [5, None], list: [5], tuple: [5]}
    found = []

    def edit(path: tuple[Any, ...], change: str, value: Any = ...) -> None:
        edited = copy.deepcopy(content)
        inner: Any = edited
        for key in path[:-1]:
            inner = inner[key]
        if value is ...:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        found.append((next(str(key) for key in reversed(path) if isinstance(key, str)), change, edited))

    def visit(path: tuple[Any, ...], value: Any) -> None:
        if path and path != ("format",):
            edit(path, "dropped")
            for other in wrong.get(type(value), []):
                edit(path, f"is {other!r}", other)
            if isinstance(value, torch.Tensor):
                edit(path, "of another shape", value.new_zeros(3, 3))
                edit(path, "of another dtype", value.to(torch.int16))
                edit(path, "no tensor", "x")
                edit(path, "None", None)
                edit(path, "without values", value.to("meta"))
                if value.dim() and not value.is_sparse:
                    edit(path, "sparse", value.to_sparse())
            if "forwards" in str(path[-1]) and value is not None:
                edit(path, "negative", -1)
                edit(path, "too great", 2**70)
            if path[-1] == "version":
                edit(path, "in a tensor", torch.tensor(value))
            if path[-1] == "amsgrad":
                edit(path, "on without its state", True)
            if path == ("scheduler",):
                edit((*path, "step"), "in place of the method", 5)
        if isinstance(value, dict):
            for key, item in value.items():
                visit((*path, key), item)
        elif isinstance(value, list) and path[-1] not in ("numpy", "params", "cuda"):
            for index, item in enumerate(value):
                visit((*path, index), item)

    visit((), content)
    return found


#: What a file may lack: the state of a parameter that had no gradient, flags and marks that torch fills in because its
#: versions differ in them, marks of ours for those who save the optimizer alone, and the caller's own.
OPTIONAL = {
    "state", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay",
    "initial_lr", "_is_initial", "_get_lr_called_within_step", "fp4graph.forwards", "fp4graph.seed", "fp4graph.policy",
}  # fmt: skip


@pytest.mark.slow
def test_an_edited_file_is_refused_by_the_name_of_what_is_wrong(made: Any, tmp_path: Path) -> None:
    whole, file = tmp_path / "whole.pt", tmp_path / "run.pt"
    Kept(*made(steps=1)).save(whole)
    content = torch.load(whole, weights_only=True)
    kept = Kept(*made())
    kept.load(whole)
    before = kept.states()
    loaded = []
    cases = edits(content)
    for name, change, edited in cases:
        with file.open("w+b") as out:
            sealed.save(edited, out)
        message = None
        try:
            kept.load(file)
        except fp4graph.Error as error:
            message = str(error)
        if message is None:
            loaded.append((name, change))
            kept.load(whole)
        else:
            assert str(file) in message
            named = "max_exp_avg_sq" if name == "amsgrad" else name  # what the flag asks for
            assert named in message, (name, change, message)
            assert alike(list(kept.states()), list(before)), (name, change)
    assert len(cases) > 200
    optional = {case for case in loaded if case[1] == "dropped" and case[0] in OPTIONAL}
    progress = {("step", "dropped"), ("step", "is 'x'")}  # is the caller's
    assert set(loaded) == optional | progress


@pytest.mark.slow
def test_former_layouts_load_with_a_warning(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    Kept(*made(steps=1)).save(file)
    content = torch.load(file, weights_only=True)
    kept = Kept(*made())
    torch.save(content, file)
    with pytest.raises(fp4graph.Error, match=r"run\.pt has lost the digest of its content"):
        kept.load(file)
    torch.save(content | {"version": 3}, file)
    with pytest.warns(UserWarning, match=r"run\.pt has version 3 of the layout, which has no digest"):
        kept.load(file)
    assert alike(dict(kept.model.state_dict()), content["model"])


class Around(nn.Module):
    """A model of which a policy is applied to a part, as of a LightningModule."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def test_a_policy_of_a_part_is_that_of_the_checkpoint(made: Any, tmp_path: Path) -> None:
    """Its count goes on, on which the noise of the next forward depends."""
    file, x = tmp_path / "run.pt", torch.randn(8, 64)
    model = Around(made("mxfp4-rht-sr", steps=3)[0])
    checkpoint.save(file, model)
    again = Around(made("mxfp4-rht-sr")[0])
    checkpoint.load(file, again)
    assert torch.equal(model(x), again(x))
    with pytest.raises(checkpoint.Mismatch, match="was written under policy 'mxfp4-rht-sr', this model has 'tetrajet'"):
        checkpoint.load(file, Around(made("tetrajet")[0]))
    with pytest.raises(fp4graph.Error, match=r"applied to each of parts\.0 and parts\.1.*save and load each"):
        checkpoint.save(file, Around(made()[0], made()[0]))


def test_milestones_in_a_sequence_of_schedulers(made: Any, tmp_path: Path) -> None:
    """Their Counter goes through the file."""

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
        parts = torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
        return torch.optim.lr_scheduler.SequentialLR(optimizer, list(parts), [2])

    (model, optimizer), (again, other) = made(None, steps=1), made(None, steps=1)
    first, second = scheduler(optimizer), scheduler(other)
    first.step()
    checkpoint.save(tmp_path / "run.pt", model, optimizer, scheduler=first)
    checkpoint.load(tmp_path / "run.pt", again, other, scheduler=second)
    for _ in range(4):
        first.step()
        second.step()
        assert second.get_last_lr() == first.get_last_lr()


def test_no_hook_of_the_user_runs_while_a_checkpoint_is_read(made: Any, tmp_path: Path) -> None:
    model, optimizer = made(None, steps=1)
    checkpoint.save(tmp_path / "run.pt", model, optimizer)
    seen: list[Any] = []
    handle = register_optimizer_step_post_hook(lambda *_: seen.append(1))
    try:
        checkpoint.load(tmp_path / "run.pt", model, optimizer)
    finally:
        handle.remove()
    assert not seen


def test_a_scheduler_that_refuses_its_state_leaves_everything_as_it_was(made: Any, tmp_path: Path) -> None:
    class Picky:
        value = 1

        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]
            if self.value == 2:
                raise RuntimeError("no twos")

    file = tmp_path / "run.pt"
    model, optimizer = made(None)
    two = Picky()
    two.value = 2
    checkpoint.save(file, model, optimizer, scheduler=two)
    with torch.no_grad():
        model[0].bias.add_(1)
    before, picky = model[0].bias.clone(), Picky()
    with pytest.raises(checkpoint.Mismatch, match="of another Picky: RuntimeError: no twos"):
        checkpoint.load(file, model, optimizer, scheduler=picky)
    assert picky.value == 1
    assert torch.equal(model[0].bias, before)


def test_other_files_are_refused(made: Any, tmp_path: Path) -> None:
    model, optimizer = made(None)
    with pytest.raises(fp4graph.Error, match=r"there is no checkpoint .*none\.pt$"):
        checkpoint.load(tmp_path / "none.pt", model)
    (tmp_path / "none.pt.tmp").touch()
    with pytest.raises(fp4graph.Error, match=r"the \.tmp file beside it"):
        checkpoint.load(tmp_path / "none.pt", model)
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    with pytest.raises(fp4graph.Error, match=r"not written by .*model\.load_state_dict"):
        checkpoint.load(tmp_path / "plain.pt", model)
    torch.save(model, tmp_path / "pickle.pt")  # would run code
    with pytest.raises(fp4graph.Error, match=r"pickle\.pt cannot be read"):
        checkpoint.load(tmp_path / "pickle.pt", model)
    (tmp_path / "text.pt").write_text("not a checkpoint at all")
    with pytest.raises(fp4graph.Error, match=r"text\.pt cannot be read"):
        checkpoint.load(tmp_path / "text.pt", model)
    torch.save({"format": checkpoint.FORMAT, "version": 99}, tmp_path / "later.pt")
    with pytest.raises(fp4graph.Error, match="version 99"):
        checkpoint.load(tmp_path / "later.pt", model)
    checkpoint.save(tmp_path / "model.pt", model)
    with pytest.raises(checkpoint.Mismatch, match=r"holds no optimizer"):
        checkpoint.load(tmp_path / "model.pt", model, optimizer)


@pytest.mark.slow
def test_another_policy_is_refused_with_the_difference(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    checkpoint.save(file, *made(steps=1))
    with pytest.raises(checkpoint.Mismatch) as caught:
        checkpoint.load(file, *made("tetrajet"))
    message = str(caught.value)
    assert "written under policy 'tetrajet-qema', this model has 'tetrajet'" in message
    assert "  -techniques:\n  -- q_ema\n" in message
    assert "description" not in message
    with pytest.raises(checkpoint.Mismatch, match="'tetrajet-qema', but this model is not applied"):
        checkpoint.load(file, *made(None))
    with pytest.raises(checkpoint.Mismatch, match=r"seed=0.* seed 3"):
        checkpoint.load(file, *made(seed=3))
    # A renamed copy is the same policy.
    text = fp4graph.load_policy("tetrajet-qema").to_yaml().replace("name: tetrajet-qema", "name: mine")
    (tmp_path / "mine.yaml").write_text(text)
    checkpoint.load(file, *made(tmp_path / "mine.yaml"))


@pytest.mark.slow
def test_phases_go_on_where_they_were(tmp_path: Path) -> None:
    phases = [{"at": 0.5, "operands": {"backward": "keep"}}]
    policy = {"version": 1, "name": "p", "extends": "tetrajet-qema", "phases": phases}
    file = tmp_path / "run.pt"

    def make(total_forwards: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = fp4graph.apply(nn.Sequential(nn.Linear(64, 64)), policy, backend="eager", total_forwards=total_forwards)
        return model, fp4graph.prepare_optimizer(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            losses.append(model(torch.randn(8, 64)).square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses]

    model, optimizer = make()
    train(model, optimizer, 5)
    checkpoint.save(file, model, optimizer)
    expected = train(model, optimizer, 3)
    model, optimizer = make()
    checkpoint.load(file, model, optimizer)
    assert train(model, optimizer, 3) == expected
    with pytest.raises(
        checkpoint.Mismatch, match="training of 8 forwards, this one has 9: phases would begin at other steps"
    ):
        checkpoint.load(file, *make(total_forwards=9))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tetrajet", None])
def test_another_policy_can_be_asked_for(made: Any, tmp_path: Path, policy: str | None) -> None:
    file = tmp_path / "run.pt"
    model, optimizer = made(steps=2)
    checkpoint.save(file, model, optimizer)
    other, its = made(policy)
    checkpoint.load(file, other, its, same_policy=False)
    assert alike(dict(fp4graph.strip(model.state_dict())), dict(fp4graph.strip(other.state_dict())))
    # And back: what the file lacks begins anew.
    checkpoint.save(file, other, its)
    checkpoint.load(file, *made(), same_policy=False)


def test_another_model_is_refused_untouched(made: Any, tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    checkpoint.save(file, *made(None))
    model, optimizer = made(None, width=32)
    before = model[2].bias.detach().clone() + 1
    with torch.no_grad():
        model[2].bias.copy_(before)  # fits the file, so that load_state_dict would have written it
    with pytest.raises(checkpoint.Mismatch, match=r"0\.weight is \(64, 64\) there and \(32, 64\) here; 0\.bias is"):
        checkpoint.load(file, model, optimizer)
    assert torch.equal(model[2].bias, before)
    with pytest.raises(
        checkpoint.Mismatch, match=r"weight is missing; bias is missing; 0\.weight is not in this model"
    ):
        checkpoint.load(file, nn.Linear(2, 2))
    other, its = made(None)
    with torch.no_grad():
        other[2].bias.copy_(before)
    with pytest.raises(checkpoint.Mismatch, match="another optimizer"):
        checkpoint.load(file, other, torch.optim.AdamW(other[0].parameters()))
    checkpoint.save(file, other, its, scaler=torch.amp.GradScaler("cpu", enabled=False))
    other, its = made(None)
    with pytest.raises(checkpoint.Mismatch, match="loss scaling disabled, here it is enabled"):
        checkpoint.load(file, other, its, scaler=torch.amp.GradScaler("cpu"))
    assert not torch.equal(other[2].bias, before)


def test_what_would_run_code_on_reading_is_refused_on_writing(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    file = tmp_path / "run.pt"
    checkpoint.save(file, model, progress={"step": 1})
    with pytest.raises(fp4graph.Error, match=r"progress\.path\[0\] is a PosixPath; a checkpoint holds tensors"):
        checkpoint.save(file, model, progress={"path": [tmp_path]})
    endless: dict[str, Any] = {}
    endless["again"] = endless
    with pytest.raises(fp4graph.Error, match=r"^progress contains itself"):
        checkpoint.save(file, model, progress=endless)
    assert checkpoint.read_summary(file).progress == {"step": 1}

    class Kind(enum.StrEnum):
        small = "small"

    checkpoint.save(file, model, progress={"kind": Kind.small, "seed": np.int64(3), "lr": np.float64(0.5)})
    progress = checkpoint.read_summary(file).progress
    assert progress == {"kind": "small", "seed": 3, "lr": 0.5}
    assert [type(value) for value in progress.values()] == [str, int, float]


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_the_old_file_outlives_a_failed_save(
    made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    file = tmp_path / "run.pt"
    model, optimizer = made(None)
    checkpoint.save(file, model, optimizer, progress={"step": 1})

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    if broken == "write":
        import resource

        # Files of this process end at 2 KB, as on a full disk. Python ignores the signal, and gets an error.
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))
    else:
        monkeypatch.setattr(os, broken, full)
    try:
        with pytest.raises(fp4graph.Error, match=r"cannot write checkpoint .*run\.pt.*unchanged"):
            checkpoint.save(file, model, optimizer, progress={"step": 2})
    finally:
        if broken == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    monkeypatch.undo()
    assert checkpoint.read_summary(file).progress == {"step": 1}
    assert os.listdir(tmp_path) == ["run.pt"]
    checkpoint.save(file, model, optimizer, progress={"step": 2})
    assert checkpoint.read_summary(file).progress == {"step": 2}


@pytest.mark.long
@pytest.mark.process
def test_every_process_goes_on_from_its_own_state(tmp_path: Path) -> None:
    assert run_ranks(python(KILLED.with_name("ranks.py"), tmp_path), tmp_path) == ["", ""]
    # Else the test would show nothing: what one rank held was not what the other did.
    left, right = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    held = [key for key in left if "tensor_scaling" in key]
    assert held
    assert any(not torch.equal(left[key], right[key]) for key in held)
    assert all(torch.equal(left[key], right[key]) for key in left if key not in held)
    # Shards are written whole: one process can go on with what two began.
    entries = torch.load(tmp_path / "sharded.pt", weights_only=True)
    assert entries["model"]["blocks.1.rise.weight"].shape == (96, 64)
    assert entries["model"]["blocks.1.rise._fp4graph_q_ema_weight"].shape == (96, 64)
    assert entries["optimizer"]["state"][0]["exp_avg"].shape == (96, 64)
