"""``fp4graph strip`` writes what a plain model loads."""

from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import fp4graph
from fp4graph.cli import app
from fp4graph.training import checkpoint


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def run(*arguments):
    return CliRunner().invoke(app, ["strip", *map(str, arguments)])


def test_safetensors(tmp_path):
    state = fp4graph.apply(made(), "tetrajet-qema", backend="eager").state_dict()
    save_file(state, tmp_path / "in.safetensors", {"format": "pt"})
    done = run(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert done.exit_code == 0
    assert "without 2 entries" in done.output
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        made().load_state_dict({key: file.get_tensor(key) for key in file.keys()}, strict=True)  # noqa: SIM118


def test_a_checkpoint_of_another_trainer(tmp_path):
    state = fp4graph.apply(made(), "tetrajet-qema", backend="eager").state_dict()
    content = {"state_dict": state, "state_dict_ema": OrderedDict(state), "epoch": 3, "lr": [0.1, {"a": 2}]}
    content["args"] = Namespace(lr=0.1)
    torch.save(content, tmp_path / "in.pt")
    assert run(tmp_path / "in.pt", tmp_path / "out.pt").exit_code == 0
    plain = torch.load(tmp_path / "out.pt", weights_only=False)
    assert plain["args"] == Namespace(lr=0.1)
    assert plain["epoch"] == 3
    assert plain["lr"] == [0.1, {"a": 2}]
    assert isinstance(plain["state_dict_ema"], OrderedDict)
    for part in ("state_dict", "state_dict_ema"):
        made().load_state_dict(plain[part], strict=True)
    assert torch.load(tmp_path / "in.pt", weights_only=False)["state_dict"].keys() == state.keys()


def test_a_checkpoint_of_ours_keeps_its_digest(tmp_path):
    model = fp4graph.apply(made(), "tetrajet-qema", backend="eager")
    checkpoint.save(tmp_path / "in.pt", model, progress={"step": 3})
    assert "without 2 entries" in run(tmp_path / "in.pt", tmp_path / "out.pt").output
    plain = made()
    assert checkpoint.load(tmp_path / "out.pt", plain, same_policy=False) == {"step": 3}
    content = bytearray((tmp_path / "in.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "in.pt").write_bytes(content)
    assert "in.pt is damaged" in str(run(tmp_path / "in.pt", tmp_path / "other.pt").exception)
    assert not (tmp_path / "other.pt").exists()


def test_a_file_without_weights_is_an_error(tmp_path):
    itself = {"model": {}}
    itself["model"]["all"] = itself
    for content, message in (
        (5, "one int"),
        ([1, "x"], "one list"),
        (torch.zeros(3), "one Tensor"),
        ({"epoch": 3, "model": {}}, "no tensor"),
        (itself, "itself"),
    ):
        torch.save(content, tmp_path / "in.pt")
        done = run(tmp_path / "in.pt", tmp_path / "out.pt")
        assert isinstance(done.exception, fp4graph.Error)
        assert "in.pt" in str(done.exception)
        assert message in str(done.exception)
        assert not (tmp_path / "out.pt").exists()


@pytest.mark.parametrize("name", ["missing.pt", "text.pt", "text.safetensors"])
def test_what_cannot_be_read_is_an_error(tmp_path, name):
    for text in ("text.pt", "text.safetensors"):
        (tmp_path / text).write_text("hello")
    target = (tmp_path / "out").with_suffix(name[name.index(".") :])
    done = run(tmp_path / name, target)
    assert isinstance(done.exception, fp4graph.Error)
    assert name in str(done.exception)
    assert not target.exists()
