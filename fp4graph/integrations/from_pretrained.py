"""Applies a policy in transformers' ``from_pretrained``."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from torch import Tensor
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp4graph.model.api import apply
from fp4graph.model.state import NAME, is_ours
from fp4graph.policy import Policy, load_policy

_METHOD = "fp4graph"


@register_quantization_config(_METHOD)  # type: ignore[untyped-decorator,unused-ignore]
class FP4GraphConfig(QuantizationConfigMixin):  # type: ignore[misc,unused-ignore]
    """The quantization config of a model that trains under a policy.

    >>> config = FP4GraphConfig("nvfp4-te")
    >>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)

    The model is as :func:`fp4graph.apply` returns it: the same class with the same parameters, ready to train. Call
    :func:`fp4graph.prepare_optimizer` in your own loop; a Trainer takes ``FP4GraphCallback`` instead of this config.
    ``save_pretrained`` writes the weights in high precision, the state of techniques, and the policy into
    ``config.json``. ``from_pretrained`` of that folder restores all three, where this class has been imported.
    :func:`fp4graph.export` writes FP4 weights for servers.

    Args:
        policy, backend, seed, total_forwards: as for :func:`fp4graph.apply`.

    Raises:
        PolicyError: the policy cannot be loaded.
    """

    def __init__(
        self,
        policy: str | PathLike[str] | dict[str, Any] | Policy,
        *,
        backend: str = "inductor",
        seed: int | None = None,
        total_forwards: int | None = None,
        quant_method: str = _METHOD,
    ) -> None:
        self.quant_method: Any = quant_method
        self.policy = yaml.safe_load(load_policy(policy).to_yaml())
        self.backend, self.seed, self.total_forwards = backend, seed, total_forwards


@register_quantizer(_METHOD)  # type: ignore[untyped-decorator,unused-ignore]
class FP4GraphQuantizer(HfQuantizer):  # type: ignore[misc,unused-ignore]
    """Applies the policy of an :class:`FP4GraphConfig` once the weights are loaded."""

    is_trainable = True
    is_qat_trainable = True

    def is_serializable(self) -> bool:
        """Return True: the saved folder is that of a plain model, with the state of techniques beside the weights."""
        return True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, NAME}  # read below, once there are buffers for them
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        config: Any = self.quantization_config
        apply(model, config.policy, backend=config.backend, seed=config.seed, total_forwards=config.total_forwards)
        if state := _saved_state(Path(model.config._name_or_path)):
            model.load_state_dict(state, strict=False)
        return model


def _saved_state(folder: Path) -> dict[str, Tensor]:
    """Return the state of techniques in a folder of ``save_pretrained``; empty for other places."""
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        with safe_open(file, "pt") as stored:
            state |= {key: stored.get_tensor(key) for key in stored.keys() if is_ours(key)}  # noqa: SIM118
    return state
