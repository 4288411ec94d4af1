"""The survey of image models finds what works and what is refused, and goes on where it stopped."""

import json

import pytest

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
    outcomes = {name: [under["outcome"] for under in row.values()] for name, row in rows.items()}
    assert outcomes == {
        "timm/beit_base_patch16_224": ["works", "works"],
        "timm/resnet10t": ["refused", "refused"],
        "timm/vit_tiny_patch16_224": ["works", "works"],
        "torchvision/swin_t": ["works", "works"],
    }
    assert rows["timm/vit_tiny_patch16_224"]["tetrajet"]["sites"] == 2 * 4
    text = page.read_text()
    assert "| beit_base_patch16_224 | beit | 1 of 2 | works | works | stored |" in text
    assert "| resnet10t | resnet | – | refused | refused | the policy is written for a repeated stack of blocks" in text
