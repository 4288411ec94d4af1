"""Labelled images: scikit-learn's digits, torchvision's MNIST and CIFAR-10, folders, Hugging Face datasets."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from fp4graph.errors import Error, needs
from fp4graph.lab.data.folder import data_folder, visible_files

#: Means and standard deviations of the channels of ImageNet's training images.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Split:
    """Training and validation images of a data set, with the channels' mean and std for pixels in [0, 1].

    ``train`` and ``validation`` are map-style data sets of (PIL image, class number).
    """

    train: Any
    validation: Any
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def digits(data: str | None = None) -> Split:
    """Return scikit-learn's 1797 scans of handwritten digits (8x8, 17 grey levels) as 8-bit grey images.

    The split is stratified, 80/20, and the same for every seed, so that runs are comparable.
    """
    needs("sklearn", "digits are from scikit-learn")
    from PIL import Image
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    scans = load_digits()
    images = [Image.fromarray(np.uint8(np.round(scan * (255 / 16)))) for scan in scans.images]
    pairs: Any = list(zip(images, scans.target.tolist(), strict=True))
    parts = train_test_split(np.arange(len(pairs)), test_size=0.2, stratify=scans.target, random_state=0)
    train, validation = (Subset(pairs, part.tolist()) for part in parts)
    return Split(train, validation, classes=10, mean=(0.305,), std=(0.376,))


def mnist(data: str | None = None) -> Split:
    """Return MNIST from the folder ``data``, where torchvision downloads it if necessary."""
    files = "{root}/MNIST/raw has the four files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-..."
    return _torchvision("MNIST", data, files, (0.1307,), (0.3081,))


def cifar10(data: str | None = None) -> Split:
    """Return CIFAR-10 from the folder ``data``, where torchvision downloads it if necessary."""
    files = "{root}/cifar-10-batches-py exists (unpack cifar-10-python.tar.gz in {root})"
    return _torchvision("CIFAR10", data, files, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))


def _torchvision(name: str, data: str | None, files: str, mean: tuple[float, ...], std: tuple[float, ...]) -> Split:
    """Return a data set of 10 classes; ``files`` is the remedy in an error's text."""
    needs("torchvision", f"{name} is read with torchvision")
    from torchvision import datasets

    root = data_folder(name.lower(), data)
    try:
        train, validation = (getattr(datasets, name)(str(root), train=part, download=True) for part in (True, False))
    except (RuntimeError, OSError) as error:
        last = str(error).splitlines()[-1]  # torchvision's last attempt
        where = f"Make sure that {files.format(root=root)}"
        raise Error(f"{name} is not in {root}: it cannot be downloaded ({last}). {where}") from error
    return Split(train, validation, 10, mean, std)


def load(data: str | None, needed: str, *, labelled: bool) -> Split:
    """Return the images that ``--data`` names: ``hf:NAME`` or a folder; ``needed`` begins the error for None."""
    if data is None:
        classes = "FOLDER/train/CLASS/*.jpg and FOLDER/val/CLASS/*.jpg"
        layout = classes if labelled else "its images as .png or .jpg, in any subfolders"
        hub = "or --data hf:NAME for a dataset of the Hugging Face hub"
        raise Error(f"{needed}: give --data FOLDER with {layout}, {hub}")
    if data.startswith("hf:"):
        return hugging_face(data[3:], labelled=labelled)
    return (image_folder if labelled else flat_folder)(Path(data).expanduser())


def image_folder(root: Path) -> Split:
    """Return the images of a folder in ImageNet's layout: ``root/train/CLASS/*.jpg`` and ``root/val/CLASS/*.jpg``."""
    needs("timm", "image folders are read with timm")
    parts = root / "train", root / "val"
    if missing := [part.name for part in parts if not part.is_dir()]:
        layout = f"put the images in {parts[0]}/CLASS/*.jpg and {parts[1]}/CLASS/*.jpg"
        raise Error(f"{root} has no folder {' and no folder '.join(missing)}: {layout}")
    for part in parts:
        if not any(path.is_dir() for path in part.iterdir()):
            raise Error(f"{part} has no class folders: put the images in {part}/CLASS/*.jpg")
    found = [_labelled(part) for part in parts]
    classes, others = map(_classes, found)
    if unknown := [name for name in others if name and name not in classes]:  # timm would leave their images out
        raise Error(f"{parts[1]} has classes that {parts[0]} lacks: {', '.join(unknown[:3])}; give both the same names")
    train, validation = (
        each if list(each.reader.class_to_idx) == classes else _labelled(part, classes)
        for part, each in zip(parts, found, strict=True)
    )
    return Split(train, validation, len(classes), *IMAGENET)


def _classes(dataset: Any) -> list[str]:
    """Return the names of the folders that have visible images, in timm's order."""
    used = {target for _, target in dataset.reader.samples}
    return [name for name, target in dataset.reader.class_to_idx.items() if target in used]


def _labelled(part: Path, classes: Sequence[str] = ()) -> Any:
    """Return timm's dataset of the images under ``part``, without hidden ones; without classes it numbers them."""
    from timm.data.dataset_factory import create_dataset

    numbers = {name: number for number, name in enumerate(classes)}
    try:
        dataset: Any = create_dataset("", root=str(part), split=part.name, search_split=False, class_map=numbers)
    except RuntimeError as error:
        raise Error(f"{part.parent} lacks images: {error}") from error
    beginning = len(str(part))
    visible = [sample for sample in dataset.reader.samples if f"{os.sep}." not in sample[0][beginning:]]
    if not visible:
        raise Error(f"{part.parent} lacks images: all images of {part} are hidden")
    dataset.reader.samples = visible
    return dataset


def flat_folder(root: Path) -> Split:
    """Return images without labels, anywhere under ``root``; every 50th by path is for validation."""
    files = [path for path in visible_files(root) if path.suffix.lower() in (".png", ".jpg", ".jpeg", ".webp")]
    if len(files) < 50:
        raise Error(f"{root} has {len(files)} images: put at least 50 there, as .png, .jpg or .webp, in any subfolders")
    return _unlabelled(_Images(files))


def hugging_face(name: str, *, labelled: bool) -> Split:
    """Return a dataset of the Hugging Face hub, or of a folder that ``datasets.load_dataset`` reads.

    The dataset needs a column with images, and for classification a column with class numbers. Its splits ``train``
    and ``validation`` (or ``val``, ``test``) are used. A dataset without labels may have only ``train``, which is then
    divided as in :func:`flat_folder`.
    """
    needs("datasets", "hf: names are loaded with Hugging Face's datasets")
    import datasets

    try:
        parts = datasets.load_dataset(name)
    except Exception as error:  # any error of the hub, the network or a loading script
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        places = "hf:NAME of the hub if there is a network, or hf:FOLDER with its files"
        raise Error(f"dataset {name!r} cannot be loaded ({what}); give {places}") from error
    columns = parts["train"].features if "train" in parts else {}
    image, label = (
        next((key for key, column in columns.items() if isinstance(column, kind)), None)
        for kind in (datasets.Image, datasets.ClassLabel)
    )
    if image is None or (labelled and label is None):
        lacks = "images" if image is None else "class labels"
        raise Error(f"dataset {name!r} has no column of {lacks} in a split 'train'; its columns: {', '.join(columns)}")
    if held_out := next((key for key in ("validation", "val", "test") if key in parts), None):
        train, validation = (_Images(parts[part], image, label) for part in ("train", held_out))
        return Split(train, validation, 1 if label is None else columns[label].num_classes, *IMAGENET)
    if labelled:
        raise Error(f"dataset {name!r} has no split validation, val or test; its splits: {', '.join(parts)}")
    return _unlabelled(_Images(parts["train"], image))


class _Images(Dataset[Any]):
    """Pairs (image, class number): from the columns ``image`` and ``label`` of rows, or from files, with class 0."""

    def __init__(self, items: Any, image: str | None = None, label: str | None = None) -> None:
        self.items, self.image, self.label = items, image, label

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        item = self.items[index]
        if self.image is not None:
            return item[self.image].convert("RGB"), 0 if self.label is None else int(item[self.label])
        from PIL import Image

        with Image.open(item) as image:
            return image.convert("RGB"), 0


def _unlabelled(images: _Images) -> Split:
    numbers = range(len(images))
    train = Subset(images, [number for number in numbers if number % 50])
    return Split(train, Subset(images, numbers[::50]), 1, (0.5,) * 3, (0.5,) * 3)


@contextmanager
def seeded(*key: int) -> Iterator[None]:
    """Seed Python's, NumPy's and torch's CPU generators in this context, and restore them after it."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = [int(word) for word in np.random.SeedSequence(key).generate_state(3)]
    random.seed(words[0])
    np.random.seed(words[1])
    torch.default_generator.manual_seed(words[2])
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)
