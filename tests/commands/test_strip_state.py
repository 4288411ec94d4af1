"""``fp4graph strip-state`` writes a checkpoint that a plain model loads."""

from argparse import Namespace
from collections import OrderedDict

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import fp4graph
from fp4graph.training import checkpoint
from tests.helpers.commands import run


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))


def applied():
    return fp4graph.apply(made(), "tetrajet-qema", backend="eager")


def strip(source, target):
    return run("strip-state", source, target)


def test_a_safetensors_file_keeps_its_metadata(tmp_path):
    state = applied().state_dict()
    save_file(state, tmp_path / "in.safetensors", {"format": "pt"})
    assert "without 2 entries" in strip(tmp_path / "in.safetensors", tmp_path / "out.safetensors").out
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        made().load_state_dict({key: file.get_tensor(key) for key in file.keys()}, strict=True)  # noqa: SIM118


def test_a_checkpoint_of_another_trainer_keeps_its_other_entries(tmp_path):
    state = applied().state_dict()
    rest = {"args": Namespace(lr=0.1), "epoch": 3, "lr": [0.1, {"a": 2}]}
    torch.save({"state_dict": state, "state_dict_ema": OrderedDict(state), **rest}, tmp_path / "in.pt")
    assert strip(tmp_path / "in.pt", tmp_path / "out.pt").code == 0
    plain = torch.load(tmp_path / "out.pt", weights_only=False)
    assert {key: plain[key] for key in rest} == rest
    assert isinstance(plain["state_dict_ema"], OrderedDict)
    for part in ("state_dict", "state_dict_ema"):
        made().load_state_dict(plain[part], strict=True)
    assert torch.load(tmp_path / "in.pt", weights_only=False)["state_dict"].keys() == state.keys()


def test_a_checkpoint_of_fp4graph_gets_a_new_digest_and_a_damaged_one_is_refused(tmp_path):
    checkpoint.save(tmp_path / "in.pt", applied(), progress={"step": 3})
    assert "without 2 entries" in strip(tmp_path / "in.pt", tmp_path / "out.pt").out
    plain = made()
    assert checkpoint.load(tmp_path / "out.pt", plain, same_policy=False) == {"step": 3}
    content = bytearray((tmp_path / "in.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "in.pt").write_bytes(content)
    assert "in.pt is damaged" in strip(tmp_path / "in.pt", tmp_path / "other.pt").err
    assert not (tmp_path / "other.pt").exists()


ITSELF = {"model": {}}
ITSELF["model"]["all"] = ITSELF


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("in.pt", 5, "one int"), ("in.pt", [1, "x"], "one list"), ("in.pt", torch.zeros(3), "one Tensor"),
        ("in.pt", {"epoch": 3, "model": {}}, "no tensor"), ("in.pt", ITSELF, "itself"),
        ("missing.pt", None, ""), ("text.pt", b"hello", ""), ("text.safetensors", b"hello", ""),
    ],
    ids=["int", "list", "tensor", "no tensor", "itself", "missing", "text", "text as safetensors"],
)  # fmt: skip
def test_a_file_without_weights_or_that_cannot_be_read_is_an_error(name, content, says, tmp_path):
    file, target = tmp_path / name, tmp_path / f"out{name[name.index('.') :]}"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    code, _, err = strip(file, target)
    assert code == 1
    assert name in err
    assert says in err
    assert not target.exists()
