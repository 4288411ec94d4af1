"""Text as tokens: the standard library's own source, WikiText, or any text files.

The tokens of a step are a pure function of (seed, step): a resumed run, or one under another policy, sees the same.
"""

from __future__ import annotations

import sysconfig
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fp4graph.errors import Error
from fp4graph.lab.data.extras import data_folder, needs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: Ids of tokens, one after the other.
TokenArray = npt.NDArray[np.uint32]

#: Token between two documents, in every vocabulary.
SEPARATOR = 0
#: A vocabulary of this size is the bytes themselves.
BYTES = 256
#: Characters that a tokenizer is trained on at most, and those given to it at a time.
TRAINED_ON, PIECE = 50_000_000, 1 << 20
#: Folders of the standard library that are tests, tables, or not its own.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Texts:
    """Documents to train on and to validate on."""

    train: list[str]
    validation: list[str]


@dataclass(frozen=True)
class Tokens:
    """The same documents as two arrays of tokens."""

    train: TokenArray
    validation: TokenArray


def standard_library() -> Texts:
    """Return the source of Python's modules, 8 to 12 MB, every 20th for validation. It differs between versions."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    held_out = files[::20]
    return Texts([_read(file) for file in files if file not in held_out], [_read(file) for file in held_out])


def text_files(path: Path) -> Texts:
    """Return the text of a file, whose last 5 % are for validation, or of a folder's files.

    In a folder, files with ``valid`` in their name (``wiki.valid.raw``) are for validation, and files with ``test``
    are ignored. Without such names every 20th file is for validation, or the last 5 % of a single file.
    """
    if not path.exists():
        raise Error(f"--data {path}: there is no such file or folder")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if _is_text(file))
    files = [file for file in files if file == path or "test" not in file.name.lower()]
    if not files:
        raise Error(f"--data {path} has no text files")
    validation = [file for file in files if file != path and "valid" in file.name.lower()]
    if not validation and len(files) == 1:
        text = _read(files[0])
        cut = int(0.95 * len(text))
        return Texts([text[:cut]], [text[cut:]])
    validation = validation or files[::20]
    return Texts([_read(file) for file in files if file not in validation], [_read(file) for file in validation])


def wikitext() -> Texts:
    """Return WikiText-103 from the Hugging Face hub, or from the cache of ``datasets``."""
    needs("datasets", "WikiText is loaded by Hugging Face's datasets")
    import datasets

    try:
        rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1")
    except Exception as error:  # whatever the hub or the network raises
        raise Error(
            f"WikiText cannot be downloaded ({type(error).__name__}): put wiki.train.raw and wiki.valid.raw of "
            "WikiText-103 into a folder and give --data FOLDER, or give --data stdlib for Python's own source"
        ) from error
    return Texts(["".join(rows["train"]["text"])], ["".join(rows["validation"]["text"])])


def named(data: str) -> Texts:
    """Return ``stdlib``, ``wikitext``, or the text files of a path."""
    if data == "stdlib":
        return standard_library()
    return wikitext() if data == "wikitext" else text_files(Path(data).expanduser())


def prepared(texts: Texts, vocabulary: int) -> Tokens:
    """Return ``texts`` as tokens of a tokenizer of their own; :func:`data_folder` keeps both for the next time."""
    if vocabulary == BYTES:
        return tokenize(texts)
    checksum = 0
    for part in (*texts.train, *texts.validation):
        checksum = zlib.crc32(part.encode(), checksum)
    kept = data_folder("tokens") / f"{checksum:08x}-{vocabulary}"
    try:
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            _keep(texts, vocabulary, kept)
        train, validation = (np.load(kept / f"{part}.npy", mmap_mode="r") for part in ("train", "validation"))
    except OSError as error:
        raise Error(f"the tokens cannot be kept in {kept}: {error.strerror or error}; $FP4GRAPH_DATA names another "
                    "place for what is derived from data") from error  # fmt: skip
    return Tokens(train, validation)


def _keep(texts: Texts, vocabulary: int, folder: Path) -> None:
    """Make ``folder`` in one move, whoever else is making it too."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as name:
        unfinished = Path(name) / folder.name
        unfinished.mkdir()
        train_tokenizer(texts.train, vocabulary, unfinished / "tokenizer.json")
        tokens = tokenize(texts, unfinished / "tokenizer.json")
        np.save(unfinished / "train.npy", tokens.train)
        np.save(unfinished / "validation.npy", tokens.validation)
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.exists():
                raise


def _is_text(file: Path) -> bool:
    if not file.is_file() or file.name.startswith("."):
        return False
    with file.open("rb") as opened:
        return b"\0" not in opened.read(4096)


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(texts: Sequence[str], vocabulary: int, file: Path) -> None:
    """Train a byte-pair tokenizer and write it to ``file``."""
    needs("tokenizers", "text is cut by tokenizers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=["<|separator|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_head(texts, TRAINED_ON), trainer)
    file.write_text(tokenizer.to_str(), encoding="utf-8")


def tokenize(texts: Texts, tokenizer_file: Path | None = None) -> Tokens:
    """Return both parts as tokens: bytes, or those of the tokenizer in ``tokenizer_file``."""
    tokenizer = None
    if tokenizer_file is not None:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return Tokens(_encode(texts.train, tokenizer), _encode(texts.validation, tokenizer))


def _encode(texts: Sequence[str], tokenizer: Tokenizer | None) -> TokenArray:
    separator = np.array([SEPARATOR], dtype=np.uint32)
    parts: list[TokenArray] = []
    for text in texts:
        if tokenizer is None:
            parts.append(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32))
        else:
            encoded = tokenizer.encode_batch(list(_pieces(text)))
            parts += [np.array(piece.ids, dtype=np.uint32) for piece in encoded]
        parts.append(separator)
    return np.concatenate(parts)


def _pieces(text: str) -> Iterator[str]:
    """Yield ``text`` in pieces that end at line ends, which a tokenizer encodes in parallel."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE)
        end = len(text) if end < 0 else end + 1
        yield text[start:end]
        start = end


def _head(texts: Sequence[str], characters: int) -> Iterator[str]:
    for text in texts:
        for piece in _pieces(text):
            if characters <= 0:
                return
            yield piece
            characters -= len(piece)


def batch(tokens: TokenArray, size: int, context: int, seed: int, step: int) -> torch.Tensor:
    """Return ``[size, context]`` tokens from ``size`` random places."""
    places = np.random.default_rng([seed, step]).integers(0, len(tokens) - context + 1, size)
    return torch.from_numpy(tokens[places[:, None] + np.arange(context)].astype(np.int64))
