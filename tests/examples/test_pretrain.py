"""examples/pretrain_*.py: both learn, resume bit for bit after a kill, and run under torchrun."""

import re

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import LlamaConfig

from fp4graph.training import checkpoint
from tests.helpers.steps import differences

LLAMA = [
    "--backend=eager", "--policy=tetrajet", "--context=32", "--batch-size=8", "--lr=3e-3", "--validate-every=3",
]  # fmt: skip


@pytest.fixture
def small(tmp_path):
    """Return an option that names the configuration of a LLaMA of two layers."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(vocab_size=256, **sizes).save_pretrained(tmp_path / "small")
    return f"--config={tmp_path / 'small'}"


@pytest.fixture
def text(tmp_path):
    """Return an option that names a file of 60 KB of text that is easy to learn."""
    file = tmp_path / "words.txt"
    words = ["rounding", "scale", "block", "tensor", "gradient", "weight", "exponent", "mantissa"]
    chosen = np.random.default_rng(0).integers(0, len(words), 8000)
    file.write_text(" ".join(words[index] for index in chosen))
    return f"--data={file}"


def validation_losses(printed):
    return [float(loss) for loss in re.findall(r"val\. ([0-9.]*[0-9])", printed)]


STABLE = ["--optimizer=stablespam", "--accumulate=2", "--amp=bf16"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("pretrain_vit.py", ["--backend=eager", "--policy=tetrajet-qema", "--epochs=2", "--batch-size=16"]),
        ("pretrain_llama.py", [*LLAMA, "--steps=6"]),
        ("pretrain_llama.py", [*LLAMA, "--steps=6", *STABLE]),
    ],
    ids=["vit", "llama", "llama-stablespam"],
)
def test_learns_and_resumes_bit_for_bit(example, text, small, tmp_path, monkeypatch, name, options):
    if "llama" in name:
        options = [*options, text, small]
    whole, killed = tmp_path / "whole.pt", tmp_path / "killed.pt"
    first, last = validation_losses(example(name, *options, f"--checkpoint={whole}"))
    assert last < first

    save = checkpoint.save

    def killed_afterwards(*arguments, **states):
        save(*arguments, **states)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", killed_afterwards)
        with pytest.raises(KeyboardInterrupt):
            example(name, *options, f"--checkpoint={killed}")
    assert validation_losses(example(name, *options, f"--checkpoint={killed}", "--resume")) == [last]
    assert not differences(*(torch.load(file, weights_only=True) for file in (whole, killed)))


@pytest.mark.parametrize(("accumulate", "world"), [("3", "1"), ("4", "8")])
def test_a_batch_that_cannot_be_split_is_refused(example, tmp_path, monkeypatch, capsys, accumulate, world):
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(SystemExit):
        example("pretrain_llama.py", f"--accumulate={accumulate}", f"--checkpoint={tmp_path}/run.pt")
    assert "must be a multiple of --accumulate times the number of processes" in capsys.readouterr().err


def test_a_text_without_a_context_for_validation_is_refused(example, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("x" * 20 * 32)
    with pytest.raises(SystemExit):
        example("pretrain_llama.py", *LLAMA, f"--data={tmp_path / 'short.txt'}", f"--checkpoint={tmp_path / 'a.pt'}")
    assert "--data is too short" in capsys.readouterr().err


def test_images_that_fill_no_batch_are_refused(example, tmp_path):
    with pytest.raises(SystemExit, match="fewer training images than --batch-size"):
        example("pretrain_vit.py", "--batch-size=2000", f"--checkpoint={tmp_path / 'a.pt'}")


@pytest.mark.long
def test_vit_trains_from_a_folder(example, tmp_path):
    random = np.random.default_rng(0)
    for part, classes in (("train", "abc"), ("val", "ac")):
        for label in classes:
            (tmp_path / part / label).mkdir(parents=True)
            for number in range(2):
                pixels = random.integers(0, 256, (40, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / label / f"{number}.png")
    options = ["--backend=eager", "--model=test_vit", "--epochs=1", "--batch-size=3", "--amp=bf16"]
    options += ["--grad-checkpointing"]
    printed = example("pretrain_vit.py", *options, f"--data={tmp_path}", f"--checkpoint={tmp_path}/run.pt")
    assert len(validation_losses(printed)) == 1


@pytest.mark.long
@pytest.mark.process
@pytest.mark.parametrize("fsdp", [False, True])
def test_llama_runs_under_torchrun(torchrun, text, small, tmp_path, fsdp):
    options = [*LLAMA, text, small, "--steps=6", "--accumulate=2", f"--checkpoint={tmp_path}/run.pt"]
    options += ["--fsdp"] * fsdp
    printed = torchrun("pretrain_llama.py", *options)
    first, last = validation_losses(printed)  # only the first process prints
    assert last < first


@pytest.mark.long
@pytest.mark.process
def test_vit_runs_under_torchrun_as_in_one_process(example, torchrun, tmp_path):
    """Without quantization the two runs differ only in the order of the batches."""
    options = ["--backend=eager", "--policy=bf16", "--epochs=2"]
    two = validation_losses(torchrun("pretrain_vit.py", *options, f"--checkpoint={tmp_path}/two.pt"))
    one = validation_losses(example("pretrain_vit.py", *options, f"--checkpoint={tmp_path}/one.pt"))
    assert len(two) == 2
    assert two == pytest.approx(one, rel=0.01)
