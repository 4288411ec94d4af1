"""The pre-training example: what it writes and prints, that its comparison is fair, and how it says no."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

EXAMPLES = Path(__file__).parents[2] / "examples"
NARROW = [f"--model-kwargs={pair}" for pair in ("depth=2", "embed_dim=32", "num_heads=1")]
TINY = ["--backend=eager", "--device=cpu", "--batch-size=32", "--lr=3e-3", "--warmup-epochs=0", *NARROW]


@pytest.fixture(autouse=True)
def _import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python puts a script's own folder on the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


@pytest.fixture
def script(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the script's command in this process: (exit code, what it printed)."""

    def run(*arguments: str) -> tuple[int, str]:
        import pretrain_vit

        with pytest.raises(SystemExit) as stop:
            pretrain_vit.app(list(arguments))
        captured = capsys.readouterr()
        return int(stop.value.code or 0), captured.out + captured.err

    return run


@pytest.fixture
def digits() -> Any:
    import vision_data

    return vision_data.digits()


@pytest.fixture
def drained(digits: Any) -> Callable[..., Iterator[tuple[torch.Tensor, torch.Tensor]]]:
    """Batches of one epoch of digits."""
    import vision_data

    def batches(*, seed: int = 0, epoch: int = 0, workers: int = 0, wasted: int = 0) -> Any:
        recipe = vision_data.RECIPES["digits"]
        train, _ = vision_data.loaders(
            digits, recipe, img_size=16, batch_size=64, seed=seed, workers=workers, device=torch.device("cpu")
        )
        vision_data.start_epoch(train, seed, epoch)
        for images, labels in train:
            torch.rand(wasted)  # what a model with dropout does between two batches
            np.random.rand(wasted)
            yield images, labels

    return batches


def test_compares_policies_and_keeps_what_it_found(script: Any, tmp_path: Path) -> None:
    code, text = script(
        *TINY, "--epochs=2", "--limit-steps=7",
        "--policies=bf16", "--policies=tetrajet, tetrajet-qema", f"--output={tmp_path}",
    )  # fmt: skip
    assert code == 0, text
    log = json.loads((tmp_path / "log.json").read_text())
    baseline, tetrajet, qema = log["runs"]
    assert [run["policy"] for run in log["runs"]] == ["bf16", "tetrajet", "tetrajet-qema"]
    assert [run["complexity"] for run in log["runs"]] == [0, 0.5, 2.5]
    # Two blocks' qkv, proj, fc1 and fc2 are quantized; the patch convolution, two attentions and the head are not.
    assert [(run["quantized"], run["sites"]) for run in log["runs"]] == [(0, 12), (8, 12), (8, 12)]
    for run in log["runs"]:
        for curve in ("train_loss", "validation_loss", "top1"):
            assert len(run[curve]) == 2
            assert np.isfinite(run[curve]).all()
        assert 0 < run["step_seconds"] <= run["total_seconds"]
    # From the same start: near the baseline after one epoch, and not the baseline itself.
    assert tetrajet["train_loss"][0] == pytest.approx(baseline["train_loss"][0], rel=0.1)
    assert tetrajet["train_loss"] != baseline["train_loss"]
    assert tetrajet["train_loss"] != qema["train_loss"]
    assert log["settings"]["model_kwargs"]["depth"] == 2

    lines = {line.split()[0]: line for line in text.splitlines() if line.split() and line.rstrip().endswith("/12")}
    for run in log["runs"]:
        line = lines[run["policy"]].split()
        ratio = run["step_seconds"] / baseline["step_seconds"]
        assert line[1:] == [
            f"{run['complexity']:g}",
            f"{run['train_loss'][-1]:.3f}",
            f"{run['validation_loss'][-1]:.3f}",
            f"{100 * run['top1'][-1]:.1f}",
            "%",
            f"{1000 * run['step_seconds']:.1f}",
            f"{ratio:.2f}×",
            f"{run['first_step_seconds']:.1f}",
            "s",
            f"{run['quantized']}/12",
        ]
    with Image.open(tmp_path / "loss.png") as picture:
        assert picture.format == "PNG"
        assert picture.width > 600
        picture.load()
    kept = ["bf16.pt", "log.json", "loss.png", "tetrajet-qema.pt", "tetrajet.pt"]
    assert sorted(file.name for file in tmp_path.iterdir()) == kept


def test_repeats_itself_and_depends_on_the_seed(script: Any, tmp_path: Path) -> None:
    curves = []
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        options = ["--epochs=1", "--limit-steps=2", "--policies=tetrajet", f"--seed={seed}"]
        code, text = script(*TINY, *options, f"--output={tmp_path / name}")
        assert code == 0, text
        curves.append(json.loads((tmp_path / name / "log.json").read_text())["runs"][0]["train_loss"])
    assert curves[0] == curves[1] != curves[2]


def test_digits_are_split_by_class_without_leakage(digits: Any) -> None:
    import vision_data

    train, validation = digits.train, digits.validation
    assert (len(train), len(validation)) == (1437, 360)
    assert sorted(train.indices + validation.indices) == list(range(1797))
    whole = np.bincount(load_digits().target)
    assert np.abs(np.bincount(validation.labels) - 0.2 * whole).max() < 1
    assert vision_data.digits().validation.indices == validation.indices
    for part in (train, validation):
        image, label = part[7]
        assert (image.mode, image.size) == ("L", (8, 8))
        assert label == load_digits().target[part.indices[7]]
        assert np.array_equal(np.round(np.asarray(image) / 255 * 16), load_digits().images[part.indices[7]])


def test_no_two_digits_of_the_split_are_the_same_picture(digits: Any) -> None:
    """Otherwise validation would count what was learnt by heart."""
    seen = {image.tobytes() for image in digits.train.images}
    assert not any(image.tobytes() in seen for image in digits.validation.images)


def test_what_a_model_sees_depends_on_seed_and_epoch_alone(drained: Any) -> None:
    first = list(drained())
    assert len(first) == 1437 // 64
    assert {len(images) for images, _ in first} == {64}
    assert first[0][0].shape == (64, 1, 16, 16)
    for options in ({"wasted": 3}, {"workers": 2}):
        for (images, labels), (again, labels_again) in zip(first, drained(**options), strict=True):
            assert torch.equal(labels, labels_again)
            assert torch.equal(images, again)
    for options in ({"epoch": 1}, {"seed": 1}):
        images, labels = next(iter(drained(**options)))
        assert not torch.equal(labels, first[0][1])
        assert not torch.equal(images, first[0][0])


def test_an_image_is_augmented_anew_each_epoch_and_validation_never(digits: Any) -> None:
    import vision_data

    recipe = vision_data.RECIPES["digits"]
    train, validation = vision_data.loaders(
        digits, recipe, img_size=16, batch_size=64, seed=0, workers=0, device=torch.device("cpu")
    )
    before, fixed = train.dataset[3][0], validation.dataset[3][0]
    train.dataset.epoch = validation.dataset.epoch = 1
    assert not torch.equal(train.dataset[3][0], before)
    assert torch.equal(validation.dataset[3][0], fixed)
    assert recipe.augmentation["hflip"] == 0  # a mirrored digit is no digit


def test_normalization_is_that_of_the_training_pixels(digits: Any) -> None:
    pixels = np.stack([np.asarray(image) for image in digits.train.images]) / 255
    assert digits.mean[0] == pytest.approx(pixels.mean(), abs=2e-3)
    assert digits.std[0] == pytest.approx(pixels.std(), abs=2e-3)


def test_every_validation_image_counts_once(digits: Any) -> None:
    """360 images in batches of 64: the last batch of 40 is padded, and its padding is not counted."""
    import pretrain_vit
    import vision_data
    from common import Processes

    class Constant(torch.nn.Module):
        shapes: ClassVar[set[torch.Size]] = set()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.shapes.add(x.shape)
            return torch.nn.functional.one_hot(torch.full((len(x),), 3), 10).float()

    _, validation = vision_data.loaders(
        digits, vision_data.RECIPES["digits"], img_size=16, batch_size=64, seed=0, workers=0, device=torch.device("cpu")
    )
    options = dict.fromkeys(pretrain_vit.Settings.__dataclass_fields__)
    settings = pretrain_vit.Settings(**{**options, "batch_size": 64, "device": "cpu", "amp": "none"})
    loss, top1 = pretrain_vit.evaluate(Constant(), validation, settings, Processes())
    threes = digits.validation.labels.count(3) / 360
    assert top1 == pytest.approx(threes)
    assert loss == pytest.approx(np.log(9 + np.e) - threes)
    assert Constant.shapes == {(64, 1, 16, 16)}


def write_images(folder: Path, classes: str, count: int, generator: np.random.Generator) -> None:
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def test_trains_from_an_image_folder_with_mixup(script: Any, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    write_images(tmp_path / "images" / "train", "abc", 4, generator)
    write_images(tmp_path / "images" / "val", "ac", 3, generator)  # c is class 2 there too
    data = f"--data=imagefolder:{tmp_path / 'images'}"
    code, text = script(
        data, *TINY, "--epochs=1", "--batch-size=4", "--img-size=32", "--patch-size=16",
        "--policies=tetrajet", f"--output={tmp_path / 'out'}",
    )  # fmt: skip
    assert code == 0, text
    assert json.loads((tmp_path / "out" / "log.json").read_text())["runs"][0]["quantized"] == 8

    import vision_data

    _, split = vision_data.load(data.removeprefix("--data="), root=tmp_path, download=False)
    assert split.classes == 3
    assert {split.validation[index][1] for index in range(len(split.validation))} == {0, 2}


def test_goes_on_to_the_last_bit_after_a_kill(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pretrain_vit

    options = [*TINY, "--epochs=2", "--limit-steps=3", "--policies=tetrajet-qema,tetrajet"]
    assert script(*options, f"--output={tmp_path / 'whole'}")[0] == 0
    evaluations = iter(range(4))
    evaluate = pretrain_vit.evaluate

    def until_the_kill(*arguments: Any) -> Any:
        if next(evaluations) == 3:  # in the second epoch of the second policy
            raise KeyboardInterrupt
        return evaluate(*arguments)

    killed = f"--output={tmp_path / 'killed'}"
    with monkeypatch.context() as patch:
        patch.setattr(pretrain_vit, "evaluate", until_the_kill)
        assert script(*options, killed)[0] == 130
    code, text = script(*options, killed, "--resume")
    assert code == 0, text
    assert "tetrajet: epoch 2/2" in text
    assert "epoch 1/2" not in text
    whole, resumed = (json.loads((tmp_path / run / "log.json").read_text())["runs"] for run in ("whole", "killed"))
    for curve in ("policy", "train_loss", "validation_loss", "top1"):
        assert [run[curve] for run in whole] == [run[curve] for run in resumed]
    code, text = script(*options, "--lr=1e-3", killed, "--resume")
    assert code == 1
    assert "of a run with other options" in text


def test_runs_under_torchrun_on_the_batches_of_one_process(script: Any, tmp_path: Path) -> None:
    options = [*TINY, "--epochs=3", "--limit-steps=7"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    two = subprocess.run(
        [*command, str(EXAMPLES / "pretrain_vit.py"), *options, "--policies=bf16,tetrajet", f"--output={tmp_path}/two"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("tetrajet: epoch 3/3") == 1  # the first process speaks for both
    log = json.loads((tmp_path / "two" / "log.json").read_text())
    assert log["processes"] == 2
    assert [run["policy"] for run in log["runs"]] == ["bf16", "tetrajet"]
    for run in log["runs"]:
        for curve in ("train_loss", "validation_loss"):
            assert len(run[curve]) == 3
            assert np.isfinite(run[curve]).all()
            assert run[curve][-1] < run[curve][0]
    kept = ["bf16.pt", "log.json", "loss.png", "tetrajet.pt"]
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == kept

    code, text = script(*options, "--policies=bf16", f"--output={tmp_path / 'one'}")
    assert code == 0, text
    (one,) = json.loads((tmp_path / "one" / "log.json").read_text())["runs"]
    for curve in ("train_loss", "validation_loss"):  # unquantized they differ in the order of sums alone
        assert log["runs"][0][curve] == pytest.approx(one[curve], rel=1e-4)


def test_shares_make_up_the_batches_of_one_process(digits: Any) -> None:
    """Among 7 processes the last validation batch, of 3 images, leaves 4 with nothing."""
    import vision_data

    def passes(**place: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
        found = []
        for loader in vision_data.loaders(
            digits, vision_data.RECIPES["digits"], img_size=16, batch_size=119, seed=0, workers=0,
            device=torch.device("cpu"), **place,
        ):  # fmt: skip
            vision_data.start_epoch(loader, 0, 1)
            found.append([])
            for batch in loader:
                vision_data.part_ways(0, 1, place.get("rank", 0))
                found[-1].append(batch)
        return found

    shares = [passes(rank=rank, world=7) for rank in range(7)]
    assert [len(share[1][-1][1]) for share in shares] == [0, 0, 1, 0, 1, 0, 1]
    for which, whole in enumerate(passes()):
        for number, batch in enumerate(whole):
            for part, expected in enumerate(batch):
                assert torch.equal(torch.cat([share[which][number][part] for share in shares]), expected)
        assert {len(share[which]) for share in shares} == {len(whole)}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--data=mnist"], "--data 'mnist' is not known: give digits, cifar10 or imagefolder:PATH"),
        (["--data=imagefolder:{tmp}"], "{tmp} has no folder train and no folder val"),
        (["--data=imagefolder:{tmp}/half"], "{tmp}/half/train has no class folders"),
        (["--data=cifar10", "--data-root={tmp}"], "unpack cifar-10-python.tar.gz in"),
        (["--model=vit_tinny"], "Unknown model (vit_tinny)"),
        (["--model-kwargs=depth"], "--model-kwargs takes name=value, not 'depth'"),
        (["--batch-size=2000"], "--batch-size 2000 is more than the 1437 training images"),
        (["--policies=bf16,tetrajett"], "tetrajett"),
        (["--device=abacus"], "--device abacus"),
    ],
)
def test_a_mistake_is_one_sentence(script: Any, tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "half" / "train").mkdir(parents=True)
    (tmp_path / "half" / "val").mkdir()
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    policies = [] if "policies" in arguments[0] else ["--policies=tetrajet"]
    code, text = script(*policies, "--backend=eager", f"--output={tmp_path / 'out'}", *arguments)
    assert code == 1
    assert "Traceback" not in text
    (line,) = text.strip().splitlines()
    assert line.startswith("error: ")
    assert says.format(tmp=tmp_path) in line
    assert not (tmp_path / "out" / "log.json").exists()


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    from vision_report import replacing

    file = tmp_path / "log.json"
    with replacing(file) as temporary:
        temporary.write_text("first")
        assert not file.exists()
    with pytest.raises(KeyboardInterrupt), replacing(file) as temporary:  # noqa: PT012  # killed half way
        temporary.write_text("half of the sec")
        raise KeyboardInterrupt
    assert file.read_text() == "first"
    assert list(tmp_path.iterdir()) == [file]
    plain = tmp_path / "plain"
    plain.touch()
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_a_run_that_diverged_is_still_json(tmp_path: Path) -> None:
    from vision_report import Run, closing_table, write_log

    run = Run("wild", 0.0, 1, 1, [float("nan")], [float("inf")], [0.1])
    write_log([run], {"lr": 3.0}, tmp_path / "log.json")
    kept = json.loads((tmp_path / "log.json").read_text(), parse_constant=pytest.fail)
    assert (kept["lr"], kept["runs"][0]["train_loss"], kept["runs"][0]["validation_loss"]) == (3.0, [None], [None])
    assert closing_table([run], "t").row_count == 1
