"""Language modelling: LLaMAs of Hugging Face on Python's standard library, WikiText, or any text files.

The tokens of a step are a function of (seed, step), so resumed runs and runs under other policies see the same tokens.
"""

from __future__ import annotations

import math
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fp4graph.errors import Error, needs
from fp4graph.files import replacing
from fp4graph.lab.data.folder import data_folder, visible_files
from fp4graph.lab.data.loading import Batch, InMemory
from fp4graph.lab.tasks.task import PAPER, Problem, Recipe, Settings, Task

#: A sequence of token ids.
TokenArray = npt.NDArray[np.uint32]
#: Token between two documents, in every vocabulary.
SEPARATOR = 0
#: A vocabulary of this size is the bytes themselves.
BYTES = 256
#: The most characters that a tokenizer is trained on, and the characters that it gets at a time.
TRAINED_ON, PIECE = 50_000_000, 1 << 20
#: Folders below the standard library that hold tests, tables or other packages.
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages", "__pycache__"}
#: Width, feed-forward width, layers, heads, vocabulary. Except tiny, the sizes are those of GaLore (Zhao et al. 2024)
#: and StableSPAM: 8,995,968, 58,073,600, 367,969,280 and 1,339,082,752 parameters. The design-space paper takes its
#: 350M and 1B from Tseng et al. 2025, "Training LLMs with MXFP4", instead, and prints no sizes.
SIZES = {
    "tiny": (64, 176, 2, 2, BYTES),
    "9m": (128, 352, 4, 4, 32_000),
    "60m": (512, 1376, 8, 8, 32_000),
    "350m": (1024, 2736, 24, 16, 32_000),
    "1b": (2048, 5461, 24, 32, 32_000),
}
#: The most sequences of a validation.
VALIDATED = 1024


@dataclass(frozen=True)
class Parts:
    """Documents to train on and to validate on: lists of texts, or arrays of tokens."""

    train: Any
    validation: Any


def load(data: str) -> Parts:
    """Return the documents that ``data`` names: ``stdlib``, ``wikitext``, or a path to text files."""
    if data == "stdlib":
        return standard_library()
    return wikitext() if data == "wikitext" else text_files(Path(data).expanduser())


def standard_library() -> Parts:
    """Return the source of Python's modules, 8 to 12 MB by version, with every 20th module for validation."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in root.rglob("*.py") if LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    return _read(files, files[::20])


def text_files(path: Path) -> Parts:
    """Return the text of a file, or of a folder's files.

    In a folder, files with ``valid`` in their name (``wiki.valid.raw``) are for validation. Hidden files and folders,
    and files with ``test`` in their name, are ignored. If no name has ``valid``, every 20th file is for validation. If
    there is one file only, its last 5 % are.
    """
    if not path.exists():
        raise Error(f"--data {path} does not exist; give a file or folder of text")
    files, validation = [path], []
    if path.is_dir():
        files = [file for file in visible_files(path) if "test" not in file.name.lower() and _is_text(file)]
        validation = [file for file in files if "valid" in file.name.lower()]
    if not files:
        raise Error(f"--data {path} has no text files; give a file or folder of text")
    if len(validation) == len(files):
        raise Error(
            f"--data {path} has only text to validate on ({validation[0].name}); add a file without 'valid' in its name"
        )
    if validation or len(files) > 1:
        return _read(files, validation or files[::20])
    (text,) = _read(files, []).train
    cut = int(0.95 * len(text))
    return Parts([text[:cut]], [text[cut:]])


def _read(files: Sequence[Path], validation: Sequence[Path]) -> Parts:
    texts = {file: file.read_text(encoding="utf-8", errors="replace") for file in files}
    held_out = [texts.pop(file) for file in validation]
    return Parts(list(texts.values()), held_out)


def _is_text(file: Path) -> bool:
    with file.open("rb") as opened:
        return b"\0" not in opened.read(4096)


def wikitext() -> Parts:
    """Return WikiText-103 from the Hugging Face hub, or from the cache of ``datasets``."""
    needs("datasets", "WikiText is loaded with Hugging Face's datasets")
    import datasets

    try:
        rows = datasets.load_dataset("Salesforce/wikitext", "wikitext-103-raw-v1")
    except Exception as error:  # any error of the hub or the network
        raise Error(
            f"WikiText cannot be downloaded ({type(error).__name__}): put wiki.train.raw and wiki.valid.raw of "
            "WikiText-103 into a folder and give --data FOLDER, or give --data stdlib for Python's own source"
        ) from error
    return Parts(*(["".join(rows[part]["text"])] for part in ("train", "validation")))


def prepared(texts: Parts, vocabulary: int) -> Parts:
    """Return ``texts`` as tokens of a tokenizer trained on them; :func:`data_folder` caches tokens and tokenizer."""
    if vocabulary == BYTES:
        return tokenize(texts)
    checksum = 0
    for part in (texts.train, texts.validation):
        checksum = zlib.crc32(repr([len(text) for text in part]).encode(), checksum)  # where each document ends
        for text in part:
            checksum = zlib.crc32(text.encode(), checksum)
    cache = data_folder("tokens") / f"{checksum:08x}-{vocabulary}"
    try:
        if not (cache / "validation.npy").exists():  # the last file that is written
            cache.mkdir(parents=True, exist_ok=True)
            tokenizer = train_tokenizer(texts.train, vocabulary)
            with replacing(cache / "tokenizer.json") as file:
                file.write(tokenizer.to_str().encode())
            for name, tokens in vars(tokenize(texts, tokenizer)).items():
                with replacing(cache / f"{name}.npy") as file:
                    np.save(file, tokens)
        return Parts(*(np.load(cache / f"{part}.npy", mmap_mode="r") for part in ("train", "validation")))
    except OSError as error:
        remedy = "set $FP4GRAPH_DATA to another folder"
        raise Error(f"the tokens cannot be kept in {cache}: {error.strerror or error}; {remedy}") from error


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Return a byte-pair tokenizer that was trained on the first :data:`TRAINED_ON` characters of ``texts``."""
    needs("tokenizers", "text is split with tokenizers")
    from tokenizers import ByteLevelBPETokenizer

    def head() -> Iterator[str]:
        seen = 0
        for piece in chain.from_iterable(map(_pieces, texts)):
            if seen >= TRAINED_ON:
                return
            yield piece
            seen += len(piece)

    tokenizer = ByteLevelBPETokenizer()
    options: dict[str, Any] = {"min_frequency": 0, "special_tokens": ["<|separator|>"], "show_progress": False}
    tokenizer.train_from_iterator(head(), vocabulary, **options)
    return tokenizer


def tokenize(texts: Parts, tokenizer: Any = None) -> Parts:
    """Return both parts as tokens of ``tokenizer``, or as bytes for None."""
    return Parts(_encode(texts.train, tokenizer), _encode(texts.validation, tokenizer))


def _encode(texts: Sequence[str], tokenizer: Any) -> TokenArray:
    parts: list[TokenArray] = []
    for text in texts:
        if tokenizer is None:
            parts.append(np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32))
        else:
            parts += [np.array(piece.ids, np.uint32) for piece in tokenizer.encode_batch(list(_pieces(text)))]
        parts.append(np.array([SEPARATOR], np.uint32))
    return np.concatenate(parts)


def _pieces(text: str) -> Iterator[str]:
    """Yield ``text`` in pieces that end at line ends, so that a tokenizer encodes them in parallel."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE) + 1 or len(text)
        yield text[start:end]
        start = end


def batch(tokens: TokenArray, size: int, context: int, seed: int, step: int) -> torch.Tensor:
    """Return ``[size, context]`` tokens from ``size`` random places."""
    places = np.random.default_rng([seed, step]).integers(0, len(tokens) - context + 1, size)
    return torch.from_numpy(tokens[places[:, None] + np.arange(context)].astype(np.int64))


def llama(width: int, feed_forward: int, layers: int, heads: int, vocabulary: int, **options: Any) -> Any:
    """Return an untrained LLaMA; ``options`` are further arguments of ``transformers.LlamaConfig``."""
    needs("transformers", "this task's model is transformers'")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": width, "intermediate_size": feed_forward, "num_hidden_layers": layers}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_attention_heads=heads, **sizes, **options))


class Language(Problem):
    """Cross-entropy per token of the next token, in sequences of ``context`` tokens from random places of the text.

    Validation uses the first sequences of the validation text that do not overlap, at most ``VALIDATED``. Perplexity
    is the exponential of the mean loss. Losses are comparable only between runs with the same text and vocabulary.
    ``data`` is the default text.
    """

    def __init__(self, size: str, context: int, settings: Settings, data: str = "wikitext") -> None:
        tokens = tokens_of(settings.data or data, SIZES[size][-1])
        self.tokens, self.context, self.tokens_per_sample = tokens.train, context, context
        self.samples, sequences = len(tokens.train) // context, len(tokens.validation) // context
        if not (self.samples and sequences):
            raise Error(
                f"{len(tokens.train)} tokens to train on and {len(tokens.validation)} to validate on are too few for "
                f"sequences of {context}; give more text"
            )
        ids = np.asarray(tokens.validation[: min(VALIDATED, sequences) * context], dtype=np.int64)
        super().__init__(settings, None, InMemory(torch.from_numpy(ids).view(-1, context)))
        options = {"max_position_embeddings": max(1024, context), "use_cache": False}
        self.model = llama(*SIZES[size], bos_token_id=SEPARATOR, eos_token_id=SEPARATOR, **options)

    def batches(self, start: int) -> Iterator[Batch]:
        for number in count(start):
            yield (batch(self.tokens, self.batch_size, self.context, self.seed, number),)

    def measure(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        (ids,) = batch
        logits = model(input_ids=ids).logits[:, :-1].float()
        return {"loss": cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)}

    def summary(self, means: Mapping[str, float]) -> dict[str, float]:
        loss = means["loss"]
        return {"perplexity": math.exp(loss) if loss < 700 else math.inf}


@lru_cache(maxsize=2)  # a sweep trains many times on one text
def tokens_of(data: str, vocabulary: int) -> Parts:
    """Return the tokens of the text that ``--data`` names."""
    return prepared(load(data), vocabulary)


_task = partial(Task, "language", data="wikitext, stdlib, FILE or FOLDER of text")


def _llama(size: str, context: int, recipe: Recipe) -> Task:
    description = f"LLaMA {size.upper()} on WikiText, {context} tokens per sequence"
    source = f"{PAPER}; sizes of GaLore (Zhao et al. 2024)"
    return _task(f"llama-{size}", description, recipe, partial(Language, size, context), source=source)


TASKS = (
    _task("text", "A LLaMA of 2 blocks and 133,440 parameters on the bytes of Python's standard library",
          Recipe(lr=3e-3, batch_size=32, steps=300, warmup=0.1),
          partial(Language, "tiny", 64, data="stdlib"), embedded=True),
    _llama("9m", 128, Recipe(lr=1e-3, batch_size=4096, tokens=0.9e9, autocast=True)),
    _llama("60m", 512, Recipe(lr=1e-4, batch_size=128, tokens=6e9, autocast=True)),
    _llama("350m", 1024, Recipe(lr=1e-4, batch_size=16, accumulate=8, tokens=14.7e9, autocast=True)),
    _llama("1b", 1024, Recipe(lr=1e-4, batch_size=4, accumulate=512, tokens=42e9, autocast=True)),
)  # fmt: skip
