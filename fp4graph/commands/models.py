"""Models and other objects that the command line names.

A model is one of

- a timm name, such as ``deit_tiny_patch16_224``;
- ``pkg.module:factory``, the user's function or class, which returns a model, ``(model, args)`` or
  ``(model, args, kwargs)`` with the arguments of a forward;
- a folder with a ``config.json`` of Hugging Face, or the path of such a file; or
- ``hf:LlamaConfig(hidden_size=64, num_hidden_layers=2)``, a config class of transformers with its settings.

Nothing is downloaded, and no weights are loaded.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4graph.errors import Error, needs, suggest

if TYPE_CHECKING:
    from torch import nn

#: The help of ``--model``.
HELP = (
    "A timm name; your pkg.module:factory, which returns a model or (model, args); a folder with a Hugging Face "
    "config.json; or hf:LlamaConfig(hidden_size=64, ...)."
)
#: The heads for a Hugging Face config without an architecture; the first one that exists for the config is taken.
_HEADS = ("Seq2SeqLM", "MaskedLM", "CausalLM", "ImageClassification")
#: The length of a language model's input.
_LENGTH = 16


@dataclass(frozen=True)
class Named:
    """A model that the command line named, and the arguments of one forward."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def imported(text: str) -> Any:
    """Return the object that ``pkg.module:name`` names; the current folder is searched first.

    Raises:
        Error: the text has another form, or the module is missing, raises, or lacks the name.
    """
    module, _, name = text.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))) or module.endswith(".py"):
        raise Error(f"{text!r} names no object; write package.module:name without .py, such as mycode.train:run")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        loaded = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            raise Error(
                f"{text!r}: module {error.name!r} is neither in {folder} nor installed; run the command in the "
                "module's folder, or put that folder on PYTHONPATH"
            ) from None
        raise Error(f"{text!r}: importing {module} raised {type(error).__name__}: {error}") from error
    try:
        return functools.reduce(getattr, name.split("."), loaded)
    except AttributeError:
        public = [each for each in vars(loaded) if not each.startswith("_")]
        file = getattr(loaded, "__file__", None)  # a built-in module has none, and a folder None
        raise Error(f"{module}{f' ({file})' if file else ''} has no {name!r}; {suggest(name, public)[:400]}") from None


def named_model(
    text: str, *, input_size: str | None = None, batch_size: int | None = None, device: str = "cpu"
) -> Named:
    """Build the model that ``text`` names; its inputs are zeros unless a factory returns inputs.

    Args:
        text: a model, in one of the forms that this module describes.
        input_size: the shape of an input without the batch, such as ``3x224x224``, or the length of a text; None takes
            it from the model's config.
        batch_size: the batch size of the inputs; 2 by default.
        device: the device of a Hugging Face model; ``meta`` builds a model of any size without memory.

    Raises:
        Error: the name is unknown, building the model raised, or its inputs are unknown.
    """
    path = Path(text)
    if text.startswith("hf:"):
        named = Named(_hugging_face(text, _config_of(text), device))
    elif path.suffix == ".json" or (path / "config.json").is_file():
        named = Named(_hugging_face(text, _config_in(path), device))
    else:
        named = _built(text) if ":" in text else Named(_timm(text))
    if not (named.args or named.kwargs):
        return with_inputs(text, named.model, input_size, batch_size)
    if input_size or batch_size:
        raise Error(f"{text} returns its inputs itself; leave --input-size and --batch-size out")
    return named


def architecture(config: Any, source: object) -> Any:
    """Return transformers' model class for ``config``, which was read from ``source``."""
    import transformers

    name = (config.architectures or [None])[0]
    kind = getattr(transformers, str(name), None)
    if kind is None:
        raise Error(f"{source} names the architecture {name!r}, which transformers lacks here; update transformers")
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        config._experts_implementation = "grouped_mm"  # the form in which experts are quantized
    return kind


def _timm(text: str) -> nn.Module:
    needs("timm", "models are made with timm", "vision")
    import timm

    if not timm.is_model(text):
        near = suggest(text, timm.list_models())[:400]
        raise Error(
            f"timm has no model {text!r}, and no folder {text!r} has a config.json; {near} "
            "Write your own model as pkg.module:factory, a transformers model as hf:LlamaConfig(hidden_size=64, ...)"
        )
    model: nn.Module = timm.create_model(text)
    return model


def _built(text: str) -> Named:
    """Return the result of the factory that ``text`` names."""
    from torch import nn

    factory = imported(text)
    try:
        result = factory() if callable(factory) and not isinstance(factory, nn.Module) else factory
    except Exception as error:
        what = f"{text}() raised {type(error).__name__}: {error}"
        raise Error(f"{what}; a factory must take no arguments") from error
    parts = result if isinstance(result, tuple) else (result,)
    if not (1 <= len(parts) <= 3 and isinstance(parts[0], nn.Module)):
        types = ", ".join(type(part).__name__ for part in parts)
        returned = f"({types})" if isinstance(result, tuple) else types
        raise Error(f"{text} returned {returned}; return a model, (model, args) or (model, args, kwargs)")
    args: Any = parts[1] if len(parts) > 1 else ()
    kwargs = parts[2] if len(parts) > 2 else {}
    if isinstance(args, Mapping):
        args, kwargs = (), {**args, **kwargs}
    return Named(parts[0], tuple(args) if isinstance(args, tuple | list) else (args,), kwargs)


def _config_of(text: str) -> Any:
    """Return the config that ``hf:Class(key=value, ...)`` describes; values must be literals, so no code runs."""
    needs("transformers", "hf: names a config of transformers", "hf")
    import transformers

    match = re.fullmatch(r"hf:(\w+)(?:\((.*)\))?", text, re.DOTALL)
    try:
        name, settings = (match[1], _keywords(match[2] or "")) if match else ("", {})
    except (SyntaxError, ValueError):
        match = None
    if match is None:
        raise Error(f"{text!r} is not a config; write hf:LlamaConfig(hidden_size=64, num_hidden_layers=2)")
    kind = getattr(transformers, name, None) if name.endswith("Config") else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedConfig)):
        configs = [each for each in dir(transformers) if each.endswith("Config")]
        raise Error(f"transformers {transformers.__version__} has no config {name!r}; {suggest(name, configs)[:400]}")
    try:
        return kind(**settings)
    except Exception as error:
        raise Error(f"{text} raised {type(error).__name__}: {error}") from error


def _keywords(text: str) -> dict[str, Any]:
    """Return the literals of ``key=value, ...``; raise SyntaxError or ValueError for other values."""
    call = ast.parse(f"_({text})", mode="eval").body
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):  # **mapping
        raise ValueError(text)
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


def _config_in(path: Path) -> Any:
    needs("transformers", f"{path} is read with transformers", "hf")
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:
        raise Error(f"{path} cannot be read as a config of transformers: {error}") from error


def _hugging_face(text: str, config: Any, device: str) -> nn.Module:
    """Return a model of ``config`` with random weights; if the config names no architecture, choose a head."""
    import torch
    import transformers

    if not config.architectures:
        heads = [getattr(transformers, f"AutoModelFor{head}")._model_mapping for head in _HEADS]
        mapping = next((each for each in heads if type(config) in each), transformers.AutoModel._model_mapping)
        if type(config) not in mapping:
            raise Error(f"{text}: transformers has no model for a {type(config).__name__}")
        kind = mapping[type(config)]
        config.architectures = [(kind[0] if isinstance(kind, tuple) else kind).__name__]
    try:
        with torch.device(device):
            model: nn.Module = architecture(config, text)(config)
    except Error:
        raise
    except Exception as error:
        raise Error(f"{text}: making the model raised {type(error).__name__}: {error}") from error
    return model


def with_inputs(text: str, model: nn.Module, input_size: str | None = None, batch_size: int | None = None) -> Named:
    """Return ``model``, named ``text``, with a batch of zeros of ``input_size``, or of the sizes in the model's config.

    A decoder beside an encoder gets tokens: as many as an encoder of text, 16 otherwise.
    """
    import torch

    sizes: Any = input_size.split("x") if input_size else _sizes(model)
    if sizes is None:
        raise Error(f"the inputs of {text} are unknown; return (model, args) from the factory, or give --input-size")
    if not all(str(size).isdecimal() and len(str(size)) < 10 and int(size) for size in sizes):
        raise Error(f"--input-size {input_size!r} is not a shape; write sizes separated by x, such as 3x224x224")
    name = str(getattr(model, "main_input_name", ""))
    is_text = name == "input_ids"
    device = next(model.parameters(), torch.empty(0)).device
    zeros = functools.partial(torch.zeros, batch_size or 2, device=device)
    first = zeros(*map(int, sizes), dtype=torch.long if is_text else torch.float32)
    if not name:
        return Named(model, (first,))
    if not getattr(model.config, "is_encoder_decoder", False):
        return Named(model, (), {name: first})
    return Named(model, (), {name: first, "decoder_input_ids": first if is_text else zeros(_LENGTH, dtype=torch.long)})


def _sizes(model: nn.Module) -> list[int] | None:
    """Return the shape of one input of a model of timm or transformers; None for other models."""
    if isinstance(getattr(model, "default_cfg", None), Mapping):
        return list(getattr(model, "default_cfg")["input_size"])  # noqa: B009
    name, config = getattr(model, "main_input_name", None), getattr(model, "config", None)
    size = getattr(config, "image_size", None)
    if name == "pixel_values" and size:
        sides = list(size) if isinstance(size, list | tuple) else [size, size]
        return [getattr(config, "num_channels", 3), *sides]
    return [_LENGTH] if name == "input_ids" else None
