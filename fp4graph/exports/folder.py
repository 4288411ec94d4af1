"""Writes the folder of an exported model atomically."""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fp4graph.errors import Error
from fp4graph.exports.names import is_hugging_face

#: Files of tokenizers and processors that are copied unchanged; a second chat template or tokenizer has a folder.
COPIED = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*.model", "spiece.*",
    "chat_template*", "additional_chat_templates/*", "*tokenizer*/*", "*processor_config.json",
    "*.tiktoken",
)  # fmt: skip


class Saving(Protocol):
    """A tokenizer or a processor."""

    def save_pretrained(self, folder: str, /) -> Any: ...


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder; make it ``target``, in parents that may be new, when the block ends without an error.

    Raises:
        Error: ``target`` exists or cannot be written.
    """
    if target.exists() or target.is_symlink():
        raise Error(f"{target} already exists; give another folder, or remove it")
    try:
        existing = next(parent for parent in target.parents if parent.exists() or parent.is_symlink())
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=existing))
    except OSError as error:
        raise Error(f"cannot write {target}: {error.strerror or error}; give another folder") from error
    try:
        yield temporary
        allowed = ~_umask()
        temporary.chmod(0o777 & allowed)  # mkdtemp and safetensors let only the owner read what they make
        for file in (path for path in temporary.rglob("*") if path.is_file()):  # tokenizers make folders too
            file.chmod(0o666 & allowed)
            with file.open("rb") as written:
                os.fsync(written.fileno())
        if target.exists():  # os.rename would replace an empty folder
            raise Error(f"{target} was made during the export; give another folder")
        target.parent.mkdir(parents=True, exist_ok=True)  # only now, so that an error leaves no new parent
        temporary.rename(target)
    except OSError as error:
        raise Error(f"cannot write {target}: {error.strerror or error}. No files are left; make room") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], shard: str | int) -> None:
    """Write ``model.safetensors``, or shards of at most ``shard`` and an index."""
    from huggingface_hub import save_torch_state_dict

    # Views are copied, because the file holds each tensor separately.
    copies = {k: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for k, tensor in tensors.items()}
    save_torch_state_dict(copies, str(folder), max_shard_size=shard, metadata={"format": "pt"})


def write_config(folder: Path, model: nn.Module, quantization: Mapping[str, Any] | None = None) -> None:
    """Write ``config.json``, with ``quantization`` as its ``quantization_config``, and the model's generation config.

    A model of timm gets the fields of timm's hub layout; other models get only their class.
    """
    if is_hugging_face(model):
        config: Any = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        config.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        config.save_pretrained(str(folder))
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(folder))
    else:
        content = {"architectures": [type(model).__name__]}
        timm: Any = getattr(model, "pretrained_cfg", None)
        if isinstance(timm, dict) and "architecture" in timm:
            classes = getattr(model, "num_classes", None)
            content |= {"architecture": timm["architecture"], "num_classes": classes, "pretrained_cfg": timm}
            content = json.loads(json.dumps(content, default=str))
    added = {} if quantization is None else {"quantization_config": quantization}
    write_json(folder / "config.json", content | added)


def copy_tokenizer(folder: Path, model: nn.Module, tokenizer: Saving | None) -> None:
    """Save ``tokenizer``; for None, copy the tokenizer and processor in the folder from which the model was loaded."""
    if tokenizer is not None:
        tokenizer.save_pretrained(str(folder))
        return
    name = getattr(model, "name_or_path", None)
    source = Path(name) if isinstance(name, str) and name else None
    if source is None or not source.is_dir():
        return
    for pattern in COPIED:
        for file in source.glob(pattern):
            copied = folder / file.relative_to(source)
            if file.is_file() and not copied.exists():
                copied.parent.mkdir(exist_ok=True)
                shutil.copy(file, copied)
