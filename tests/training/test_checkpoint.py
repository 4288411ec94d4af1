"""Checkpoints: a kill cannot ruin them, training goes on bit for bit, and files that do not fit are refused."""

from __future__ import annotations

import copy
import enum
import functools
import json
import operator
import os
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

import fp4graph
from fp4graph.training import checkpoint, sealed
from tests.helpers.disks import files_no_larger_than
from tests.helpers.processes import python, run, run_ranks
from tests.helpers.steps import descend, differences
from tests.helpers.training import applied, prepared

pytestmark = pytest.mark.usefixtures("operation_by_operation")

HERE = Path(__file__).parent
KILLS = 20


def make(
    policy: Any = "tetrajet-qema", width: int = 64, steps: int = 0, **how: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under a policy, or a plain model for None, and its optimizer, after ``steps``."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if policy is not None:
        optimizer = prepared(applied(model, policy, **how))
    train(model, optimizer, steps)
    return model, optimizer


plain = functools.partial(make, None)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    return descend(lambda: model(torch.randn(8, 64)).square().mean(), optimizer, steps)


class Kept:
    """A model, and all else that a checkpoint restores."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.scheduler = StepLR(optimizer, 2)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def states(self) -> Any:
        parts = self.model, self.optimizer, self.scheduler, self.scaler
        generators = torch.get_rng_state(), hash(random.getstate()), hash(str(np.random.get_state()))
        return copy.deepcopy([dict(part.state_dict()) for part in parts]), generators

    def save(self, file: Path, **progress: Any) -> None:
        parts = {"scheduler": self.scheduler, "scaler": self.scaler}
        checkpoint.save(file, self.model, self.optimizer, **parts, progress=progress or {"step": 1})

    def load(self, file: Path) -> dict[str, Any]:
        return checkpoint.load(file, self.model, self.optimizer, scheduler=self.scheduler, scaler=self.scaler)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run.pt"


@pytest.mark.long
@pytest.mark.process
def test_twenty_kills_change_nothing(tmp_path: Path) -> None:
    deaths = json.loads(run(python(HERE / "killed.py", tmp_path, str(KILLS)), env={"OMP_NUM_THREADS": "1"}))
    assert len(deaths) == KILLS
    assert all(death["killed"] for death in deaths)
    steps = [death["steps"] for death in deaths]
    assert steps == sorted(set(steps)), "a checkpoint went back"
    assert all(death["left_half_a_file"] for death in deaths[1::2])  # those that were in the middle of a save
    whole, killed = (torch.load(tmp_path / f"{name}.pt", weights_only=True) for name in ("whole", "killed"))
    assert len(whole["progress"]["losses"]) > max(steps)
    assert not differences(whole, killed)
    assert differences(whole, {**killed, "model": {**killed["model"], "0.bias": killed["model"]["0.bias"] + 1e-8}})


def test_everything_comes_back(file: Path) -> None:
    kept = Kept(*make(steps=3))
    kept.optimizer.step()
    kept.scheduler.step()
    history = [1.0, (2, None)]
    kept.save(file, step=3, loss=np.float32(0.5), history=history, best=torch.tensor([7]))
    drawn = (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random())

    other = Kept(*make())
    other.scaler = torch.amp.GradScaler("cpu")
    back = other.load(file)
    assert (torch.rand(2).tolist(), np.random.rand(2).tolist(), random.random()) == drawn
    assert back.pop("best").tolist() == [7]
    assert back == {"step": 3, "loss": 0.5, "history": history}
    assert not differences(kept.states()[0], other.states()[0])
    assert int(dict(other.model.named_buffers())["_fp4graph_forwards"]) == 3
    assert other.scheduler.last_epoch == 1
    assert other.scaler.get_scale() == 8.0
    summary = checkpoint.read_summary(file)
    assert (summary.policy, summary.progress["step"]) == (fp4graph.load_policy("tetrajet-qema").to_yaml(), 3)
    # Without an optimizer the model alone is loaded, and the random state stays.
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    checkpoint.load(file, other.model)
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.slow
def test_two_hundred_bit_flips_load_nothing(file: Path) -> None:
    Kept(*make(steps=2)).save(file)
    content, chance = file.read_bytes(), random.Random(9)
    kept = Kept(*make(steps=1))
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
        assert not differences(kept.states(), before), number
    file.write_bytes(content)
    kept.load(file)


OF_ANOTHER_KIND: dict[type, list[Any]] = {
    int: ["x"], float: ["x", None], str: [5], dict: [5, None], list: [5], tuple: [5]
}  # fmt: skip


def changes(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return wrong values of an entry, by their descriptions."""
    found = {f"is {other!r}": other for other in OF_ANOTHER_KIND.get(type(value), [])}
    if isinstance(value, torch.Tensor):
        found |= {"of another shape": value.new_zeros(3, 3), "of another dtype": value.to(torch.int16)}
        found |= {"no tensor": "x", "None": None, "without values": value.to("meta")}
        if value.dim() and not value.is_sparse:
            found["sparse"] = value.to_sparse()
    if "forwards" in str(path[-1]) and value is not None:
        found |= {"negative": -1, "too great": 2**70}
    if path[-1] == "version":
        found["in a tensor"] = torch.tensor(value)
    if path[-1] == "amsgrad":
        found["on without its state"] = True
    return found


def edits(content: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the content without each entry, and with each wrong value: (the entry's name, the change, the content)."""

    def visit(path: tuple[Any, ...], value: Any) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
        if path and path != ("format",):
            yield path, "dropped", ...
            yield from ((path, change, other) for change, other in changes(path, value).items())
        if path == ("scheduler",):
            yield (*path, "step"), "in place of the method", 5
        items = value.items() if isinstance(value, dict) else ()
        if isinstance(value, list) and path[-1] not in ("numpy", "params", "cuda"):
            items = enumerate(value)
        for key, item in items:
            yield from visit((*path, key), item)

    for path, change, value in visit((), content):
        edited = copy.deepcopy(content)
        *outer, last = path
        inner = functools.reduce(operator.getitem, outer, edited)
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
        yield next(str(key) for key in reversed(path) if isinstance(key, str)), change, edited


#: Entries that a file may lack: the state of a parameter that had no gradient; flags and marks that torch fills in,
#: because its versions differ in them; and fp4graph's marks for those who save the optimizer alone.
OPTIONAL = {
    "state", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay",
    "initial_lr", "_is_initial", "_get_lr_called_within_step", "fp4graph.forwards", "fp4graph.seed", "fp4graph.policy",
    "fp4graph.entries",
}  # fmt: skip


@pytest.mark.slow
def test_an_edited_file_is_refused_and_the_wrong_entry_is_named(file: Path) -> None:
    whole = file.with_name("whole.pt")
    Kept(*make(steps=1)).save(whole)
    kept = Kept(*make())
    kept.load(whole)
    before = kept.states()
    loaded = []
    cases = list(edits(torch.load(whole, weights_only=True)))
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
            assert not differences(kept.states(), before), (name, change)
    assert len(cases) > 200
    optional = {case for case in loaded if case[1] == "dropped" and case[0] in OPTIONAL}
    progress = {("step", "dropped"), ("step", "is 'x'")}  # an entry of the caller
    assert set(loaded) == optional | progress


@pytest.mark.slow
def test_former_layouts_load_with_a_warning(file: Path) -> None:
    Kept(*make(steps=1)).save(file)
    content = torch.load(file, weights_only=True)
    kept = Kept(*make())
    torch.save(content, file)
    with pytest.raises(fp4graph.Error, match=r"run\.pt has lost the digest of its content"):
        kept.load(file)
    torch.save(content | {"version": 3}, file)
    with pytest.warns(UserWarning, match=r"run\.pt has version 3 of the layout, which has no digest"):
        kept.load(file)
    assert not differences(dict(kept.model.state_dict()), content["model"])


def test_the_policy_of_a_part_of_the_model_is_saved_and_checked(file: Path) -> None:
    """Such a model is a LightningModule. The count goes on, on which the noise of the next forward depends."""
    x = torch.randn(8, 64)
    model, again = (nn.Sequential(make("mxfp4-rht-sr", steps=steps)[0]) for steps in (3, 0))
    checkpoint.save(file, model)
    checkpoint.load(file, again)
    assert torch.equal(model(x), again(x))
    with pytest.raises(checkpoint.Mismatch, match="was written under policy 'mxfp4-rht-sr', this model has 'tetrajet'"):
        checkpoint.load(file, nn.Sequential(make("tetrajet")[0]))
    with pytest.raises(fp4graph.Error, match=r"applied to each of 0 and 1.*save and load each"):
        checkpoint.save(file, nn.Sequential(make()[0], make()[0]))


def test_milestones_in_a_sequence_of_schedulers_are_restored(file: Path) -> None:
    """MultiStepLR keeps its milestones in a Counter."""

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.SequentialLR:
        parts = LinearLR(optimizer), MultiStepLR(optimizer, [1, 2])
        return SequentialLR(optimizer, list(parts), [2])

    made, again = plain(steps=1), plain(steps=1)
    first, second = scheduler(made[1]), scheduler(again[1])
    first.step()
    checkpoint.save(file, *made, scheduler=first)
    checkpoint.load(file, *again, scheduler=second)
    for _ in range(4):
        first.step()
        second.step()
        assert second.get_last_lr() == first.get_last_lr()


def test_no_hook_of_the_user_runs_while_a_checkpoint_is_read(file: Path) -> None:
    made, hook = plain(steps=1), mock.Mock()
    checkpoint.save(file, *made)
    handle = register_optimizer_step_post_hook(hook)
    try:
        checkpoint.load(file, *made)
    finally:
        handle.remove()
    hook.assert_not_called()


def test_a_scheduler_that_refuses_its_state_leaves_everything_as_it_was(file: Path) -> None:
    class Picky(SimpleNamespace):
        def state_dict(self) -> dict[str, int]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.value = state["value"]
            if self.value == 2:
                raise RuntimeError("no twos")

    model, optimizer = plain()
    checkpoint.save(file, model, optimizer, scheduler=Picky(value=2))
    with torch.no_grad():
        model[0].bias.add_(1)
    before, picky = model[0].bias.clone(), Picky(value=1)
    with pytest.raises(checkpoint.Mismatch, match="of another Picky: RuntimeError: no twos"):
        checkpoint.load(file, model, optimizer, scheduler=picky)
    assert picky.value == 1
    assert torch.equal(model[0].bias, before)


def test_a_packed_model_is_refused_before_anything_is_loaded(file: Path) -> None:
    kept = Kept(*make("tetrajet", steps=1))
    kept.save(file)
    train(kept.model, kept.optimizer, 1)
    kept.scheduler.step()
    fp4graph.pack_frozen(kept.model.requires_grad_(False))
    before = kept.states()
    with pytest.raises(fp4graph.Error, match=r"^0\.weight is packed and cannot be loaded"):
        kept.load(file)
    assert not differences(kept.states(), before)


def cut(file: Path, share: float) -> None:
    checkpoint.save(file, *make(steps=1))
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])


TRUNCATED = r"run\.pt cannot be read as tensors and plain data: it is truncated"
#: Files that are no checkpoint: the function that makes the file, and the error's text.
FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    **{f"cut at {share}": (lambda file, share=share: cut(file, share), TRUNCATED) for share in (0.0, 0.01, 0.5, 0.99)},
    "none": (lambda file: None, r"there is no checkpoint .*run\.pt$"),
    "temporary": (lambda file: file.with_name("run.pt.tmp").touch(), r"the \.tmp file beside it"),
    "state dict": (
        lambda file: torch.save(plain()[0].state_dict(), file),
        r"not written by .*model\.load_state_dict",
    ),
    "pickle": (lambda file: torch.save(plain()[0], file), r"run\.pt cannot be read"),  # would run code
    "text": (lambda file: file.write_text("not a checkpoint at all"), r"run\.pt cannot be read"),
    "later": (lambda file: torch.save({"format": checkpoint.FORMAT, "version": 99}, file), "version 99"),
}


@pytest.mark.parametrize("kind", FILES)
def test_other_files_are_refused(kind: str, file: Path) -> None:
    write, message = FILES[kind]
    write(file)
    model, optimizer = plain(steps=1)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(fp4graph.Error, match=message):
        checkpoint.load(file, model, optimizer)
    assert not differences(model.state_dict(), before)


def of_a_part() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a plain model, and an optimizer of its first layer."""
    model, _ = plain()
    return model, torch.optim.AdamW(model[0].parameters())


#: Loads under other circumstances: the parts that are saved, the parts to load, and the error's text.
OTHERS: dict[str, tuple[Callable[[], Any], Callable[[], Any], str]] = {
    "policy": (
        make,
        lambda: make("tetrajet"),
        r"(?s)^(?!.*description).*policy 'tetrajet-qema', this model has 'tetrajet'.*  -techniques:\n  -- q_ema\n",
    ),
    "no policy": (make, plain, "'tetrajet-qema', but this model is not applied"),
    "seed": (make, lambda: make(seed=3), r"seed=0.* seed 3"),
    "shape": (plain, lambda: plain(width=32), r"0\.weight is \(64, 64\) there and \(32, 64\) here; 0\.bias is"),
    "model": (plain, lambda: (nn.Linear(2, 2),), r"weight is missing; bias is missing; 0\.weight is not in this model"),
    "optimizer": (plain, of_a_part, "another optimizer"),
    "no optimizer": (lambda: plain()[:1], plain, "holds no optimizer"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_circumstances_are_refused_and_nothing_is_loaded(kind: str, file: Path) -> None:
    save, load, message = OTHERS[kind]
    checkpoint.save(file, *save())
    model, *rest = load()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)  # a part fits the file, and load_state_dict would have written it
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(checkpoint.Mismatch, match=message):
        checkpoint.load(file, model, *rest)
    assert not differences(dict(model.state_dict()), before)


def test_disabled_loss_scaling_is_another_circumstance(file: Path) -> None:
    checkpoint.save(file, *plain(), scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(checkpoint.Mismatch, match="loss scaling disabled, here it is enabled"):
        checkpoint.load(file, *plain(), scaler=torch.amp.GradScaler("cpu"))


def test_a_renamed_copy_is_the_same_policy(file: Path) -> None:
    checkpoint.save(file, *make())
    text = fp4graph.load_policy("tetrajet-qema").to_yaml().replace("name: tetrajet-qema", "name: mine")
    file.with_name("mine.yaml").write_text(text)
    checkpoint.load(file, *make(file.with_name("mine.yaml")))


@pytest.mark.slow
def test_phases_go_on_where_they_were(file: Path) -> None:
    phases = [{"at": 0.5, "operands": {"backward": "keep"}}]
    policy = {"version": 1, "name": "p", "extends": "tetrajet-qema", "phases": phases}
    made = make(policy, steps=5, total_forwards=8)
    checkpoint.save(file, *made)
    expected = train(*made, 3)
    again = make(policy, total_forwards=8)
    checkpoint.load(file, *again)
    assert train(*again, 3) == expected
    message = "training of 8 forwards, this one has 9: phases would begin at other steps"
    with pytest.raises(checkpoint.Mismatch, match=message):
        checkpoint.load(file, *make(policy, total_forwards=9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("base", "phase"), [("tetrajet", {"techniques": ["q_ema"]}), ("tetrajet-qema", {"rules": [], "default": "keep"})]
)
def test_a_phase_that_begins_or_ends_the_state_of_a_technique_goes_on(base: str, phase: Any, file: Path) -> None:
    policy = {"version": 1, "name": "p", "extends": base, "phases": [{"at": 3, **phase}]}
    for steps in (2, 5):
        made, again = make(policy, steps=steps), make(policy)
        checkpoint.save(file, *made)
        expected = train(*made, 3)
        checkpoint.load(file, *again)
        assert train(*again, 3) == expected
        assert not differences(*(dict(each.state_dict()) for each, _ in (made, again)))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tetrajet", None])
def test_another_policy_is_accepted_on_request(policy: str | None, file: Path) -> None:
    made, other = make(steps=2), make(policy)
    checkpoint.save(file, *made)
    checkpoint.load(file, *other, same_policy=False)
    assert not differences(*(dict(fp4graph.strip(each.state_dict())) for each, _ in (made, other)))
    # The other way round, the state that the file lacks begins anew.
    checkpoint.save(file, *other)
    checkpoint.load(file, *make(), same_policy=False)


def test_progress_that_could_not_be_read_back_is_refused(file: Path) -> None:
    checkpoint.save(file, nn.Linear(2, 2), progress={"step": 1})
    endless: dict[str, Any] = {}
    endless["again"] = endless

    class Image(torch.Tensor): ...

    marked = torch.zeros(2)
    marked.kind = Image  # type: ignore[attr-defined]
    for progress, message in (
        ({"last": torch.zeros(2).as_subclass(Image)}, r"progress\.last, of type Image, could not .*as_subclass"),
        ({"last": [marked]}, r"progress\.last\[0\], of type Tensor, could not be read back"),
        ({"seed": 2**3000}, r"progress\.seed, of type int, could not be read back"),
        ({"path": [Path()]}, r"progress\.path\[0\] is a PosixPath; a checkpoint holds tensors"),
        (endless, "^progress contains itself"),
    ):
        with pytest.raises(fp4graph.Error, match=message):
            checkpoint.save(file, nn.Linear(2, 2), progress=progress)
        assert checkpoint.read_summary(file).progress == {"step": 1}


def test_enumerations_and_other_kinds_of_numbers_become_plain(file: Path) -> None:
    class Kind(enum.StrEnum):
        small = "small"

    class Rate(float):
        __float__ = None  # type: ignore[assignment]  # the value itself is read

    numbers = {"seed": np.int64(3), "lr": np.float64(0.5), "rate": Rate(0.1)}
    checkpoint.save(file, nn.Linear(2, 2), progress={"kind": Kind.small, **numbers})
    progress = checkpoint.read_summary(file).progress
    assert progress == {"kind": "small", "seed": 3, "lr": 0.5, "rate": 0.1}
    assert [type(value) for value in progress.values()] == [str, int, float, float]


def test_a_link_stays_a_link_to_the_new_file(file: Path) -> None:
    latest = file.with_name("latest.pt")
    latest.symlink_to(file.name)  # to a file that does not exist yet
    for step in (1, 2):
        checkpoint.save(latest, nn.Linear(2, 2), progress={"step": step})
        assert latest.is_symlink()
        assert checkpoint.read_summary(file).progress == {"step": step}
    assert sorted(os.listdir(file.parent)) == ["latest.pt", "run.pt"]


@pytest.mark.parametrize("broken", ["write", "fsync", "replace"])
def test_the_old_file_outlives_a_failed_save(broken: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = plain()
    checkpoint.save(file, model, optimizer, progress={"step": 1})

    if broken != "write":
        monkeypatch.setattr(os, broken, mock.Mock(side_effect=OSError(28, "No space left on device")))
    with (
        files_no_larger_than(2048) if broken == "write" else nullcontext(),
        pytest.raises(fp4graph.Error, match=r"cannot write checkpoint .*run\.pt.*unchanged"),
    ):
        checkpoint.save(file, model, optimizer, progress={"step": 2})
    monkeypatch.undo()
    assert checkpoint.read_summary(file).progress == {"step": 1}
    assert os.listdir(file.parent) == ["run.pt"]
    checkpoint.save(file, model, optimizer, progress={"step": 2})
    assert checkpoint.read_summary(file).progress == {"step": 2}


@pytest.mark.long
@pytest.mark.process
def test_every_process_goes_on_from_its_own_state(tmp_path: Path) -> None:
    assert run_ranks(python(HERE / "ranks.py", tmp_path), tmp_path) == ["", ""]
    # The ranks hold different scales; otherwise the test would show nothing.
    left, right = (torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2))
    held = [key for key in left if "tensor_scaling" in key]
    assert held
    assert any(not torch.equal(left[key], right[key]) for key in held)
    assert all(torch.equal(left[key], right[key]) for key in left if key not in held)
    # Sharded tensors are written whole, so that one process can go on with them.
    entries = torch.load(tmp_path / "sharded.pt", weights_only=True)
    model, state = entries["model"], entries["optimizer"]["state"]
    whole = model["blocks.1.rise.weight"], model["blocks.1.rise._fp4graph_q_ema_weight"], state[0]["exp_avg"]
    assert [each.shape for each in whole] == [(96, 64)] * 3
