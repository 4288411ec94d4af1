"""Data in the forms that users have: torchvision's files, folders of images, Hugging Face datasets, text."""

import pickle
import struct
import tarfile
from hashlib import md5
from itertools import islice
from unittest.mock import Mock
from urllib.error import URLError
from urllib.request import OpenerDirector

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from fp4graph.errors import Error, needs
from fp4graph.lab.data import images as sources
from fp4graph.lab.data.loading import Order, in_memory
from fp4graph.lab.runs.train import Run, learning_rate_factor, train
from fp4graph.lab.tasks import TASKS, classification, diffusion, language
from tests.lab.test_tasks import settings


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Keep caches in the test's folder, and ``datasets`` off the network."""
    import datasets

    monkeypatch.setenv("FP4GRAPH_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    in_memory.cache_clear()


def noise(count, size=(40, 30), seed=0):
    random = np.random.default_rng(seed)
    return [Image.fromarray(random.integers(0, 256, (size[1], size[0], 3), np.uint8)) for _ in range(count)]


def pictures(folder, count, seed=0):
    folder.mkdir(parents=True)
    for number, picture in enumerate(noise(count, seed=seed)):
        picture.save(folder / f"{number:03}.png")


def mxfp4(task, **options):
    """Train a step under mxfp4; return how many sites were quantized and whether the run diverged."""
    outcome = train(Run(task, policy="mxfp4", steps=1, device="cpu", **options))
    return outcome.quantized, outcome.diverged


def contents(batches):
    """Return the set of the first 50 values of each image of some batches."""
    return {image.flatten()[:50].numpy().tobytes() for batch in batches for image in batch[0]}


@pytest.fixture(scope="module")
def augmented():
    return TASKS["digits-augmented"].make(settings("digits-augmented"))


def test_digits_are_split_by_class_without_leakage(augmented):
    from sklearn.datasets import load_digits

    train_part, validation, split = augmented.train.images, augmented.held_out.images, sources.digits()
    assert (len(train_part), len(validation)) == (1437, 360)
    assert sorted(train_part.indices + validation.indices) == list(range(1797))
    assert np.abs(np.bincount([label for _, label in validation]) - 0.2 * np.bincount(load_digits().target)).max() < 1
    assert split.validation.indices == validation.indices
    assert not {image.tobytes() for image, _ in train_part} & {image.tobytes() for image, _ in validation}
    pixels = np.stack([np.asarray(image) for image, _ in train_part]) / 255
    assert (split.mean[0], split.std[0]) == pytest.approx((pixels.mean(), pixels.std()), abs=2e-3)


def test_whole_passes_are_those_of_a_shuffling_loader():
    order = Order(100, 16, seed=5, like_loader=True)
    assert order.samples == 96
    expected = []
    for epoch in range(2):
        torch.manual_seed(5 + epoch)
        expected += [rows.tolist() for rows in DataLoader(range(100), batch_size=16, shuffle=True, drop_last=True)]
    assert [rows.tolist() for _, rows in islice(order.rows(0), 12)] == expected
    assert next(order.rows(8))[1].tolist() == expected[8]
    assert [key for key, _ in islice(order.rows(0), 12)] == [0] * 6 + [1] * 6


@pytest.mark.process
def test_an_image_is_augmented_anew_each_epoch_and_validation_never(augmented):
    first, number = next(augmented.batches(0)), 1437 // 64
    assert first[0].shape == (64, 1, 16, 16)
    again = TASKS["digits-augmented"].make(settings("digits-augmented", workers=1))
    torch.rand(3)  # as a model with dropout draws between two batches
    assert all(map(torch.equal, first, next(again.batches(0))))
    index = next(augmented.order.rows(0))[1][0]
    with sources.seeded(0, 0, int(index)):
        alone = augmented.train.transform(augmented.train.images[index][0])
    assert torch.equal(alone, first[0][0])
    later = next(augmented.batches(number))
    assert not torch.equal(later[1], first[1])
    assert all(map(torch.equal, next(augmented.validation()), next(again.validation())))
    assert "HorizontalFlip" not in str(augmented.train.transform)  # a mirrored digit is not a digit


def test_the_schedule_is_timms():
    from timm.scheduler import create_scheduler_v2

    chosen, steps = settings("digits-augmented"), 528
    assert chosen.total_steps(TASKS["digits-augmented"].make(chosen)) == steps
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=chosen.lr)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=24, warmup_epochs=1, warmup_lr=1e-6, min_lr=chosen.lr / 100,
        step_on_epochs=False, updates_per_epoch=22,
    )  # fmt: skip
    for step in range(steps):
        scheduler.step_update(step)
        rate = chosen.lr * learning_rate_factor(step, steps, chosen)
        assert rate == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-14)


@pytest.mark.long
def test_mnist_is_read_from_its_files(tmp_path):
    folder, count = tmp_path / "MNIST" / "raw", 40
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    pixels = {part: random.integers(0, 256, (count, 28, 28), np.uint8) for part in ("train", "t10k")}
    for part, values in pixels.items():
        header = struct.pack(">IIII", 2051, count, 28, 28)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(header + values.tobytes())
        labels = bytes(number % 10 for number in range(count))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">II", 2049, count) + labels)
    problem = TASKS["mnist"].make(settings("mnist", data=str(tmp_path), batch_size=20))
    assert problem.samples == 40
    images, labels = (torch.cat(parts) for parts in zip(*islice(problem.batches(0), 2), strict=True))
    assert images.shape == (40, 1, 28, 28)
    order = problem.order.rows()
    rows = torch.cat([next(order)[1], next(order)[1]])
    expected = (torch.from_numpy(pixels["train"])[rows] / 255 - 0.1307) / 0.3081
    assert torch.allclose(images[:, 0], expected, atol=1e-5)
    assert labels.tolist() == [int(row) % 10 for row in rows]
    assert mxfp4("mnist", data=str(tmp_path), batch_size=8) == (16, False)


@pytest.fixture
def cifar10(tmp_path, monkeypatch):
    """Write CIFAR-10's files with five pictures each, and have torchvision expect their checksums."""
    from torchvision.datasets import CIFAR10

    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, md5(data).hexdigest()]

    def part(name):
        pixels = np.random.default_rng(len(name)).integers(0, 256, (5, 3072), np.uint8)
        return write(name, {"data": pixels, "labels": [0, 1, 2, 3, 9]})

    monkeypatch.setattr(CIFAR10, "train_list", [part(f"data_batch_{number}") for number in range(1, 6)])
    monkeypatch.setattr(CIFAR10, "test_list", [part("test_batch")])
    _, checksum = write("batches.meta", {"label_names": list("abcdefghij")})
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": checksum})


@pytest.mark.long
@pytest.mark.usefixtures("cifar10")
@pytest.mark.parametrize(("task", "quantized"), [("cifar10", 24), ("small-diffusion", 39)])
def test_cifar10_is_read_from_its_files(task, quantized, tmp_path):
    """The ViT has 6 blocks of 4 linears; the U-Net has 7 attentions of 4 linears and 11 time projections."""
    options = {"data": str(tmp_path), "batch_size": 4}
    problem = TASKS[task].make(settings(task, **options))
    assert problem.samples == 25
    images = next(problem.batches(0))[0]
    assert images.shape == (4, 3, 32, 32)
    if task == "small-diffusion":
        assert -1 <= images.min() <= images.max() <= 1
    assert mxfp4(task, **options) == (quantized, False)


@pytest.mark.parametrize(
    ("task", "data", "says"),
    [
        ("mnist", None, r"MNIST is not in .*cache/mnist: .* downloaded \(.*no network.*\).*MNIST/raw has the four"),
        ("cifar10", None, r"CIFAR10 is not in .*: it cannot be downloaded .*\(unpack cifar-10-python.tar.gz in"),
        ("cifar10", "{tmp}", r"CIFAR10 is not in .*: it cannot be downloaded"),  # its archive is damaged
        ("small-diffusion", None, r"CIFAR10 is not in"),
        ("big-diffusion", None, "task 'big-diffusion' needs FFHQ"),
        ("big-diffusion", "{tmp}", "has 4 images: put at least 50 there"),
        ("deit-tiny", None, "task 'deit-tiny' needs ImageNet-1K: give --data FOLDER with FOLDER/train/CLASS"),
        ("deit-tiny", "{tmp}", "has no folder train and no folder val: put the images in"),
        ("deit-tiny", "{tmp}/nowhere", "has no folder train"),
        ("deit-tiny", "{tmp}/other", r"val has classes that .*train lacks: Cat; give both the same names"),
        ("deit-tiny", "{tmp}/empty", "empty lacks images: Found 0 images"),
        ("deit-tiny", "hf:{tmp}/nowhere", "cannot be loaded"),
        ("text", "{tmp}/nowhere", "nowhere does not exist"),
        ("text", "{tmp}/short.txt", "too few for sequences of 64; give more text"),
        ("text", "{tmp}/held_out", r"has only text to validate on \(wiki.valid.raw\); add a file without 'valid' in"),
    ],
)
def test_the_error_of_missing_data_says_where_to_put_them(task, data, says, tmp_path, monkeypatch):
    monkeypatch.setattr(OpenerDirector, "open", Mock(side_effect=URLError("no network")))
    (tmp_path / "short.txt").write_text("too short")
    images_in(tmp_path / "other", "train/cat", "train/dog", "val/Cat", "val/dog")
    for name in ("empty/train/cat", "empty/val/cat"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "held_out").mkdir()
    (tmp_path / "held_out" / "wiki.valid.raw").write_text("text " * 100)
    (tmp_path / "cifar-10-batches-py").mkdir()
    tarfile.open(tmp_path / "cifar-10-python.tar.gz", "w:gz").close()
    with pytest.raises(Error, match=says):
        train(Run(task, data=data and data.format(tmp=tmp_path), device="cpu"))


@pytest.fixture
def folder(tmp_path):
    """Make a folder in ImageNet's layout with two classes."""
    root = tmp_path / "images"
    for part, seed in (("train", 0), ("val", 10)):
        for number, name in enumerate(("cat", "dog")):
            pictures(root / part / name, 3, seed=seed + number)
    return root


@pytest.mark.long
def test_imagenet100_is_not_augmented(folder):
    options = {"data": str(folder), "batch_size": 2, "autocast": False}
    problem = TASKS["imagenet100"].make(settings("imagenet100", **options))
    before = torch.get_rng_state()
    images, labels = next(problem.batches(0))
    assert torch.equal(torch.get_rng_state(), before)  # reading images uses no random numbers of the model
    assert images.shape == (2, 3, 224, 224)
    assert set(labels.tolist()) <= {0, 1}
    assert [len(batch[1]) for batch in problem.validation()] == [2, 2, 2]
    assert len(contents(islice(problem.batches(0), 9))) == 6  # three passes over six images, never changed
    assert mxfp4("imagenet100", validation_batches=1, **options) == (48, False)


@pytest.mark.slow
def test_deit_is_augmented_mixed_and_the_same_from_any_batch(folder):
    chosen = settings("deit-tiny", data=str(folder), batch_size=2)
    problem = TASKS["deit-tiny"].make(chosen)
    batches = list(islice(problem.batches(0), 5))
    again = next(TASKS["deit-tiny"].make(chosen).batches(4))
    assert all(map(torch.equal, batches[4], again))
    for _, labels in batches:
        assert labels.shape == (2, 2)
        assert torch.allclose(labels.sum(1), torch.ones(2))
    assert len(contents(batches)) == 10
    assert torch.isfinite(problem.measure(problem.model, batches[0])["loss"]).all()
    with pytest.raises(Error, match="batch size 3 is odd"):
        TASKS["deit-tiny"].make(settings("deit-tiny", data=str(folder), batch_size=3))


@pytest.mark.process
def test_batches_do_not_depend_on_the_number_of_workers(folder):
    found = [
        next(TASKS["imagenet100"].make(settings("imagenet100", data=str(folder), batch_size=3, workers=n)).batches(1))
        for n in (0, 1)
    ]
    assert all(map(torch.equal, *found))


def images_in(root, *folders):
    for folder in folders:
        (root / folder).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / folder / "0.png")


def test_hidden_images_in_class_folders_are_left_out(tmp_path):
    images_in(tmp_path, "train/cat", "train/dog", "val/dog", "val/.old", "train/.cache/bird", "train/cat/.thumbnails")
    (tmp_path / "train/cat/._0.png").write_bytes(b"of macOS")
    split = sources.image_folder(tmp_path)
    assert split.classes == 2
    assert [target for _, target in split.train.reader.samples] == [0, 1]
    assert [target for _, target in split.validation.reader.samples] == [1]


def test_class_folders_may_lie_in_other_folders_and_be_empty(tmp_path):
    images_in(tmp_path, "train/pets/cat", "train/farm/cow", "val/all/cat", "val/all/cow")
    (tmp_path / "val/unused").mkdir()
    split = sources.image_folder(tmp_path)
    assert (split.classes, len(split.train), len(split.validation)) == (2, 2, 2)


def test_a_class_without_training_images_is_named(tmp_path):
    images_in(tmp_path, "train/cat", "val/cat", "val/dog")
    (tmp_path / "train/dog").mkdir()
    with pytest.raises(Error, match=r"val has classes that .*train lacks: dog"):
        sources.image_folder(tmp_path)


@pytest.mark.slow
def test_swin_is_augmented_as_swin_is(folder):
    """At a width that is fast to test."""
    narrow = {"embed_dim": 32, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 8), "drop_path_rate": 0.2}
    chosen = settings("swin-tiny", data=str(folder), batch_size=2)
    split = sources.image_folder(folder)
    model = "swin_tiny_patch4_window7_224"
    problem = classification.transformed(split, model, chosen, **narrow, **classification.AUGMENTED)
    assert torch.isfinite(problem.measure(problem.model, next(problem.batches(0)))["loss"]).all()
    assert all(name in str(problem.train.transform) for name in ("RandomResizedCrop", "RandAugment", "RandomErasing"))
    assert "Random" not in str(problem.held_out.transform)
    assert (chosen.clip, chosen.schedule, chosen.weight_decay) == (5.0, "cosine", 0.05)
    assert chosen.warmup * 90 == pytest.approx(20)


def test_diffusion_on_a_folder(tmp_path):
    """The problem of big-diffusion, with a small U-Net."""
    pictures(tmp_path / "faces" / "00000", 100)
    chosen = settings("big-diffusion", data=str(tmp_path / "faces"), batch_size=4)
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"block_out_channels": (16, 16), "layers_per_block": 1, "norm_num_groups": 8}
    problem = diffusion.from_folder(chosen, size=8, **blocks, **sizes)
    assert problem.samples == 98
    batch = next(problem.batches(0))
    assert batch[0].shape == batch[1].shape == (4, 3, 8, 8)
    assert batch[0].min() >= -1
    assert len(next(problem.validation())[0]) == 2
    assert problem.measure(problem.model, batch)["loss"].shape == (4,)


def dataset(folder, parts, *, labelled):
    """Write Parquet files of noise as the Hugging Face hub has them; return their folder."""
    import datasets

    columns = {"picture": datasets.Image()}
    if labelled:
        columns["kind"] = datasets.ClassLabel(names=["cat", "dog", "cow"])
    folder.mkdir()
    for part, count in parts.items():
        content = {"picture": noise(count, (24, 20)), "kind": [number % 3 for number in range(count)]}
        content = {name: content[name] for name in columns}
        rows = datasets.Dataset.from_dict(content, features=datasets.Features(columns))
        rows.to_parquet(folder / f"{part}-00000-of-00001.parquet")
    return str(folder)


@pytest.mark.slow
def test_a_hugging_face_dataset_of_classes(tmp_path):
    name = dataset(tmp_path / "animals", {"train": 6, "validation": 3}, labelled=True)
    problem = TASKS["imagenet100"].make(settings("imagenet100", data=f"hf:{name}", batch_size=3))
    (held_out,) = problem.validation()
    assert (problem.samples, problem.model.num_classes, held_out[1].tolist()) == (6, 3, [0, 1, 2])
    with pytest.raises(Error, match="has no split validation, val or test; its splits: train"):
        sources.hugging_face(dataset(tmp_path / "half", {"train": 3}, labelled=True), labelled=True)
    with pytest.raises(Error, match="has no column of class labels in a split 'train'; its columns: picture"):
        sources.hugging_face(dataset(tmp_path / "bare", {"train": 3}, labelled=False), labelled=True)


def test_a_hugging_face_dataset_of_faces(tmp_path):
    split = sources.hugging_face(dataset(tmp_path / "faces", {"train": 100}, labelled=False), labelled=False)
    assert (len(split.train), len(split.validation)) == (98, 2)
    assert split.train[0][0].size == (24, 20)


@pytest.mark.long
def test_a_llama_learns_a_text_file(tmp_path):
    file = tmp_path / "words.txt"
    words = np.array(["rounding", "scale", "block", "tensor", "gradient", "weight"])
    file.write_text(" ".join(words[np.random.default_rng(0).integers(0, len(words), 6000)]))
    outcome = train(Run("text", policy="mxfp4", data=str(file), batch_size=8, steps=30, device="cpu", lr=1e-2))
    assert outcome.validation_loss < 3.5  # bytes begin at ln 256 = 5.5
    assert outcome.metrics["perplexity"] == pytest.approx(np.exp(outcome.validation_loss))


def test_tokens_are_kept_for_each_split_of_a_text(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4GRAPH_DATA", str(tmp_path))
    splits = [language.Parts(["some words "], ["of text"]), language.Parts(["some ", "words "], ["of text"]),
              language.Parts(["some words of "], ["text"])]  # fmt: skip
    made, read = ([language.prepared(split, 300).train.tolist() for split in splits] for _ in range(2))
    assert [tokens.count(language.SEPARATOR) for tokens in made] == [1, 2, 1]
    assert len(made[0]) < len(made[2])
    assert read == made


def test_hidden_files_and_folders_hold_no_data(tmp_path):
    """A clone of a repository has text in .git, and a Mac adds files such as ._0.png that are no images."""
    for name in (".git/HEAD", ".notes", "a.txt", "b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert language.text_files(tmp_path) == language.Parts(["b.txt"], ["a.txt"])
    pictures(tmp_path / "faces", 50)
    pictures(tmp_path / "faces" / ".thumbnails", 1)
    (tmp_path / "faces" / "._0.png").write_bytes(b"no image")
    split = sources.flat_folder(tmp_path / "faces")
    assert (len(split.train), len(split.validation)) == (49, 1)


@pytest.mark.parametrize("vocabulary", [256, 400])
def test_text_becomes_tokens_and_back(tmp_path, vocabulary):
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "wiki.train.raw").write_text("naïve café Σ γ, " * 50 + "\n" + "more of it\n" * 50)
    (folder / "wiki.valid.raw").write_text("café")
    (folder / "wiki.test.raw").write_text("never")
    (folder / "picture.png").write_bytes(b"\x89PNG\0")
    texts = language.text_files(folder)
    assert (len(texts.train), texts.validation) == (1, ["café"])
    tokenizer = None if vocabulary == language.BYTES else language.train_tokenizer(texts.train, vocabulary)
    tokens = language.tokenize(texts, tokenizer)
    assert tokens.train[-1] == tokens.validation[-1] == language.SEPARATOR
    assert tokens.train.max() < vocabulary
    decode = tokenizer.decode if tokenizer else lambda codes: bytes(codes).decode()
    assert decode(tokens.train[:-1].tolist()) == texts.train[0]
    if tokenizer:
        assert len(tokens.train) < len(texts.train[0])
        assert all(map(np.array_equal, vars(tokens).values(), vars(language.tokenize(texts, tokenizer)).values()))


def test_batches_are_a_function_of_seed_and_step():
    tokens = np.arange(1000, dtype=np.uint32)
    rows, *others = (language.batch(tokens, 4, 16, *place) for place in ((1, 2), (1, 2), (1, 3), (2, 2)))
    assert rows.shape == (4, 16)
    assert (rows.diff(dim=1) == 1).all()
    assert [torch.equal(rows, other) for other in others] == [True, False, False]
    assert language.batch(tokens[:16], 1, 16, 0, 0).tolist() == [list(range(16))]


@pytest.mark.slow
def test_the_standard_library_is_text_enough():
    texts = language.standard_library()
    assert sum(map(len, texts.train)) > 4_000_000
    assert len(texts.train) > 15 * len(texts.validation) > 100
    assert not set(texts.train[:5]) & set(texts.validation)


def test_wikitext_comes_from_the_hub_or_from_files(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no network")))
    with pytest.raises(Error, match=r"WikiText cannot be downloaded .*put wiki.train.raw and wiki.valid.raw"):
        train(Run("llama-9m", device="cpu"))
    parts = {name: datasets.Dataset.from_dict({"text": [" = A title = \n", name]}) for name in ("train", "validation")}
    monkeypatch.setattr(datasets, "load_dataset", lambda *_: datasets.DatasetDict(parts))
    assert language.load("wikitext") == language.Parts([" = A title = \ntrain"], [" = A title = \nvalidation"])
    for part in ("train", "valid", "test"):
        (tmp_path / f"wiki.{part}.raw").write_text(part)
    assert language.load(str(tmp_path)) == language.Parts(["train"], ["valid"])


def test_pixels_are_normalized_channel_by_channel():
    pixels = np.stack([np.full((3, 3), 0, np.uint8), np.full((3, 3), 255, np.uint8), np.zeros((3, 3), np.uint8)], -1)
    pairs = [(Image.fromarray(pixels), 0)]
    split = sources.Split(pairs, pairs, 1, (0.25, 0.5, 0.5), (0.5, 0.25, 0.5))
    for centred, expected in ((False, [-0.5, 2.0, -1.0]), (True, [-1.0, 1.0, -1.0])):
        _, train_part, _ = in_memory(lambda _: split, None, centred=centred)  # called at once
        ((images, labels),) = train_part.batches(iter([(0, torch.tensor([0]))]))
        assert [channel.unique().item() for channel in images[0]] == expected
        assert (images.shape, labels.tolist()) == ((1, 3, 3, 3), [0])


def test_a_package_that_is_not_installed_is_named():
    with pytest.raises(Error, match=r"made by nobody, which is not installed; pip install .*\[tasks\]"):
        needs("a_package_of_nobodys", "models are made by nobody")
