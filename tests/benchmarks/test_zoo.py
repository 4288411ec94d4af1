"""The survey of image models finds what works and what is refused, and goes on where it stopped."""

import json

import pytest

from benchmarks import zoo
from tests.helpers.processes import ROOT, python, run


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.process
def test_models_work_or_are_refused(tmp_path):
    stored = {"family": "beit", "outcome": "works", "remark": "stored", "sites": 1, "of": 2}
    file, page = tmp_path / "zoo.jsonl", tmp_path / "models.md"
    earlier = {"model": "timm/beit_base_patch16_224", "tetrajet": stored, "tetrajet-qema": stored}
    file.write_text(json.dumps(earlier) + "\n")
    chosen = "vit_tiny_patch16_224,timm/resnet10t,torchvision/swin_t"
    options = (f"--models={chosen}", f"--folder={tmp_path}", f"--document={page}")
    run(python("-m", "benchmarks.zoo", *options), cwd=ROOT)
    rows = {row.pop("model"): row for row in map(json.loads, file.read_text().splitlines())}
    outcomes = {name: [row[policy]["outcome"] for policy in zoo.POLICIES] for name, row in rows.items()}
    assert outcomes == {
        "timm/beit_base_patch16_224": ["works", "works"],
        "timm/resnet10t": ["refused", "refused"],
        "timm/vit_tiny_patch16_224": ["works", "works"],
        "torchvision/swin_t": ["works", "works"],
    }
    assert rows["timm/vit_tiny_patch16_224"]["tetrajet"]["sites"] == 2 * 4
    assert rows["timm/vit_tiny_patch16_224"]["versions"] == zoo.VERSIONS
    text = page.read_text()
    assert "| beit_base_patch16_224 | beit | 1 of 2 | works | works | stored |" in text
    assert "| resnet10t | resnet | – | refused | refused | the policy is written for a repeated stack of blocks" in text


def test_the_page_names_the_versions_that_its_rows_were_measured_with():
    row = {policy: {"family": "vit", "outcome": "works", "remark": ""} for policy in zoo.POLICIES}
    rows = {"timm/a": row, "timm/b": {**row, "versions": {**zoo.UNRECORDED, "torch": "9.9.9"}}}
    assert f"(torch {zoo.UNRECORDED['torch']} and 9.9.9," in next(zoo.page(rows))


def test_a_name_that_no_model_has_is_an_error_and_stored_models_that_are_not_installed_stay(tmp_path, monkeypatch):
    file, page = tmp_path / "zoo.jsonl", tmp_path / "models.md"
    stored = {policy: {"family": "vit", "outcome": "works", "remark": ""} for policy in zoo.POLICIES}
    file.write_text(json.dumps({"model": "timm/removed", **stored}) + "\n")
    monkeypatch.setattr(zoo, "measure", lambda case, limit: stored)
    for name, code in (("abacus", 2), ("resnet10t", 0)):
        with pytest.raises(SystemExit) as stop:
            zoo.app([f"--models={name}", f"--folder={tmp_path}", f"--document={page}"])
        assert stop.value.code == code
    assert [json.loads(line)["model"] for line in file.read_text().splitlines()] == ["timm/resnet10t", "timm/removed"]
