"""The LLaMA example: it learns, goes on to the last bit after a kill, runs under torchrun, and refuses what it must."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = [
    "--preset=tiny", "--backend=eager", "--device=cpu", "--context=32", "--batch-size=8", "--lr=3e-3", "--steps=6",
    "--warmup-steps=1", "--validate-every=3", "--validation-batches=2", "--checkpoint-every=2",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python puts a script's own folder on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the script's command in this process: (exit code, what it printed)."""

    def run(*arguments: str) -> tuple[int, str]:
        import pretrain_llama

        capsys.readouterr()  # what libraries say when they are first imported
        with pytest.raises(SystemExit) as stop:
            pretrain_llama.app(list(arguments))
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out + captured.err

    return run


@pytest.fixture
def text(tmp_path: Path) -> str:
    """An option that names a file of 60 KB, easy to learn from."""
    file = tmp_path / "words.txt"
    words = ["rounding", "scale", "block", "tensor", "gradient", "weight", "exponent", "mantissa"]
    chosen = np.random.default_rng(0).integers(0, len(words), 8000)
    file.write_text(" ".join(words[index] for index in chosen))
    return f"--data={file}"


def identical(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(identical(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(identical, left, right))
    return bool(left == right)


@pytest.mark.parametrize(
    "options",
    [["--policy=tetrajet-qema"], ["--policy=tetrajet", "--optimizer=stablespam", "--accumulate=2", "--amp=bf16"]],
    ids=["adamw", "stablespam"],
)
def test_learns_and_goes_on_to_the_last_bit(
    script: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    import pretrain_llama

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    code, printed = script(*TINY, text, *options, f"--output={whole}")
    assert code == 0, printed
    assert "14 of 17 matrix products quantized" in printed
    assert "step 3/6: loss" in printed
    log = json.loads((whole / "log.json").read_text())
    assert log["parameters"] == 133_440
    assert log["tokens_per_second"] > 0
    assert log["train_loss"][0] == pytest.approx(math.log(256), rel=0.05)
    assert log["train_loss"][-1] < log["train_loss"][0] - 0.5
    assert [step for step, _ in log["validation_loss"]] == [3, 6]
    assert log["validation_loss"][1][1] < log["validation_loss"][0][1]

    steps = iter(range(6))
    step = pretrain_llama.train_step

    def until_the_kill(*arguments: Any) -> Any:
        if next(steps) == 5:
            raise KeyboardInterrupt
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain_llama, "train_step", until_the_kill)
        code, _ = script(*TINY, text, *options, f"--output={killed}")
    assert code == 130  # what typer makes of it
    code, printed = script(*TINY, text, *options, f"--output={killed}", "--resume")
    assert code == 0, printed
    assert "resumed after step 4" in printed
    assert identical(*(torch.load(run / "checkpoint.pt", weights_only=True) for run in (whole, killed)))
    assert json.loads((killed / "log.json").read_text())["train_loss"] == log["train_loss"]


def test_runs_under_torchrun_as_it_is(text: str, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    run = subprocess.run(
        [*command, str(EXAMPLES / "pretrain_llama.py"), *TINY, text, f"--output={tmp_path / 'run'}"],
        env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("step 6: loss") == 1  # the first process speaks for both
    log = json.loads((tmp_path / "run" / "log.json").read_text())
    assert log["processes"] == 2
    assert log["train_loss"][-1] < log["train_loss"][0] - 0.5


@pytest.mark.parametrize("vocabulary", [256, 400])
def test_text_becomes_tokens_and_back(tmp_path: Path, vocabulary: int) -> None:
    from tokenizers import Tokenizer

    from fp4graph.experiments.data import text as text_data

    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "wiki.train.raw").write_text("naïve café Σ γ, " * 50 + "\n" + "more of it\n" * 50)
    (folder / "wiki.valid.raw").write_text("café")
    (folder / "wiki.test.raw").write_text("never")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    texts = text_data.text_files(folder)
    assert [len(texts.train), len(texts.validation)] == [1, 1]
    assert texts.validation == ["café"]
    file = tmp_path / "tokenizer.json"
    if vocabulary != text_data.BYTES:
        text_data.train_tokenizer(texts.train, vocabulary, file)
    tokens = text_data.tokenize(texts, vocabulary, file)
    assert tokens.train[-1] == tokens.validation[-1] == text_data.SEPARATOR
    assert tokens.train.max() < vocabulary
    if vocabulary == text_data.BYTES:
        assert bytes(tokens.train[:-1].tolist()).decode() == texts.train[0]
    else:
        tokenizer = Tokenizer.from_file(str(file))
        assert tokenizer.decode(tokens.train[:-1].tolist()) == texts.train[0]
        assert len(tokens.train) < len(texts.train[0])
        assert tokens.checksum == text_data.tokenize(texts, vocabulary, file).checksum


def test_batches_are_a_function_of_seed_and_step() -> None:
    from fp4graph.experiments.data import text as text_data

    tokens = np.arange(1000, dtype=np.uint32)
    rows = text_data.batch(tokens, 4, 16, seed=1, step=2)
    assert rows.shape == (4, 16)
    assert (rows.diff(dim=1) == 1).all()
    assert torch.equal(rows, text_data.batch(tokens, 4, 16, seed=1, step=2))
    assert not torch.equal(rows, text_data.batch(tokens, 4, 16, seed=1, step=3))
    assert not torch.equal(rows, text_data.batch(tokens, 4, 16, seed=2, step=2))
    assert text_data.batch(tokens[:16], 1, 16, 0, 0).tolist() == [list(range(16))]
    parts = [list(text_data.validation_batches(tokens, 4, 16, 15, rank, 2)) for rank in range(2)]
    assert [len(part) for part in parts] == [7, 7]  # 15 whole batches, the same number for each process
    seen = torch.cat([rows for part in parts for rows in part]).flatten()
    assert seen.unique().numel() == seen.numel()


def test_the_standard_library_is_text_enough() -> None:
    from fp4graph.experiments.data import text as text_data

    texts = text_data.standard_library()
    assert sum(map(len, texts.train)) > 4_000_000
    assert len(texts.train) > 15 * len(texts.validation) > 100
    assert not set(texts.train[:5]) & set(texts.validation)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data={tmp}/none"], "--data {tmp}/none: there is no such file or folder"),
        (["--data={tmp}/empty"], "--data {tmp}/empty has no text files"),
        (["--data={tmp}/short.txt"], "are too few for sequences of 32, 8 at a time"),
        (["--policy=tetrajett"], "tetrajett"),
        (["--accumulate=3"], "--batch-size 8 cannot be shared by 1 processes in 3 parts"),
        (["--device=abacus"], "--device abacus"),
    ],
)
def test_a_mistake_is_one_sentence(script: Any, text: str, tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    code, printed = script(*TINY, text, f"--output={tmp_path / 'out'}", *(a.format(tmp=tmp_path) for a in arguments))
    assert code == 1
    (line,) = printed.strip().splitlines()
    assert line.startswith("error: ")
    assert says.format(tmp=tmp_path) in line


def test_a_run_is_not_written_over_nor_mixed_with_another(script: Any, text: str, tmp_path: Path) -> None:
    output = f"--output={tmp_path / 'out'}"
    short = [*TINY, text, output, "--steps=2"]
    assert script(*short)[0] == 0
    code, printed = script(*short)
    assert code == 1
    assert "holds a run, of 2 steps: pass --resume" in printed
    code, printed = script(*short, "--resume")  # nothing is left to do
    assert code == 0
    assert "step 2: loss" in printed
    code, printed = script(*short, "--lr=1e-3", "--seed=4", "--resume")
    assert code == 1
    assert "is of another run: --lr was 0.003, is 0.001; --seed was 0, is 4" in printed


def test_a_run_that_diverges_stops(script: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pretrain_llama

    monkeypatch.setattr(pretrain_llama, "train_step", lambda *_: torch.tensor(math.nan))
    code, printed = script(*TINY, text, f"--output={tmp_path / 'out'}")
    assert code == 1
    assert "the loss of step 1 is nan" in printed
