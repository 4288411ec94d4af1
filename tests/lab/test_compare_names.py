"""Names of the trainings that are compared, and the default folders that are named after them."""

import dataclasses
import functools

import pytest
from torch import nn

import fp4graph
from fp4graph.errors import Error
from fp4graph.lab.comparison.record import folder_of, name_of
from tests.lab.trainings import loop

pytestmark = [pytest.mark.usefixtures("operation_by_operation"), pytest.mark.slow]


class Training:
    def __init__(self, *layers):
        self.layers = layers

    def __call__(self, policy, seed, log):
        return loop(policy, seed, log)


def given(policy, seed, log, path, make):
    return loop(policy, seed, log)


@pytest.mark.parametrize(
    ("make", "title"),
    [
        pytest.param(Training, "Training", marks=pytest.mark.long),
        (lambda: functools.partial(given, path="/data/x", make=Training()), "given"),
    ],
)
def test_a_training_with_settings_has_one_name_in_all_processes(tmp_path, monkeypatch, make, title):
    """In another process its objects have other addresses."""
    folder = folder_of(make())
    assert folder.startswith(f"compare-{title}")
    monkeypatch.chdir(tmp_path)
    first, again = make(), make()
    assert name_of(first) == name_of(again)
    result = fp4graph.compare(first, "tetrajet", seeds=1, timing=False, statistics=0)
    assert (result.name, result.folder) == (title, tmp_path / "runs" / folder)
    assert fp4graph.compare(again, "tetrajet", seeds=1, timing=False, statistics=0).runs == result.runs


@pytest.mark.parametrize(
    "wrap",
    [pytest.param(lambda train: train, marks=pytest.mark.long), functools.partial],
    ids=["alone", "partial"],
)
def test_the_settings_of_an_object_are_part_of_its_training(tmp_path, wrap):
    compare = functools.partial(fp4graph.compare, timing=False, folder=tmp_path)
    runs = compare(wrap(Training(1, nn.GELU())), "tetrajet", seeds=1).runs
    assert compare(wrap(Training(1, nn.GELU())), "tetrajet", seeds=1).runs == runs
    with pytest.raises(Error, match="before its source or its settings were changed"):
        compare(wrap(Training(2, nn.GELU())), "tetrajet", seeds=1)


@dataclasses.dataclass
class Settings(Training):
    data: str
    rate: float = 0.1


def test_the_default_folder_is_that_of_one_setting_and_its_name_is_valid_on_all_systems():
    partials = [functools.partial(given, path=path, make=None) for path in ("/data/x", "/data/y")]
    trainings = [given, *partials, *map(Settings, ("a/b", "a/c", "C:x")), Settings("a"), Training()]
    folders = [folder_of(train) for train in trainings]
    assert len(set(folders)) == len(folders)
    assert not set("".join(folders)) & set('/\\:*?"<>|')
    assert folders[0] == "compare-given"
    assert folders[-2:] == ["compare-Settings(data='a', rate=0.1)", "compare-Training"]


class Elsewhere:
    """Has an address as Windows writes it."""

    def __repr__(self):
        return "<Elsewhere object at 0x000001F2A3B4C5D6>"


def test_addresses_in_capitals_are_left_out_too():
    assert name_of(Elsewhere()) == "<Elsewhere object>"
