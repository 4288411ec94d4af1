"""Applies a policy in transformers' ``from_pretrained``."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import yaml
from torch import nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fp4graph.errors import Error
from fp4graph.model.api import apply
from fp4graph.model.runtime import runtime_of
from fp4graph.model.state import NAME
from fp4graph.policy import Policy, load_policy

_METHOD = "fp4graph"


@register_quantization_config(_METHOD)  # type: ignore[untyped-decorator,unused-ignore]
class FP4GraphConfig(QuantizationConfigMixin):  # type: ignore[misc,unused-ignore]
    """The quantization config of a model that trains under a policy.

    >>> config = FP4GraphConfig("nvfp4-te")
    >>> model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)

    The model is as :func:`fp4graph.apply` returns it: the same class with the same parameters, ready to train. Call
    :func:`fp4graph.prepare_optimizer` in your own loop; a Trainer takes ``FP4GraphCallback`` instead of this config.
    ``save_pretrained`` writes the weights in high precision, the state of techniques and, in ``config.json``, the
    policy that the model has at that time, or null after :func:`fp4graph.remove`. ``from_pretrained`` of that folder
    restores all three if this class has been imported. :func:`fp4graph.export` writes FP4 weights for servers.

    Args:
        policy, backend, seed, total_forwards: as for :func:`fp4graph.apply`.

    Raises:
        PolicyError: the policy cannot be loaded.
        Error: (by ``from_pretrained``) ``device_map`` put weights on several devices, on the disk or on ``meta``.
    """

    _model: weakref.ref[nn.Module] | None = None  # the model that from_pretrained returned

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
        self.policy: dict[str, Any] | None = yaml.safe_load(load_policy(policy).to_yaml())  # None: after remove()
        self.backend, self.seed, self.total_forwards = backend, seed, total_forwards

    def to_dict(self) -> dict[str, Any] | None:  # type: ignore[override,unused-ignore]
        """Return the entry of ``config.json``: the policy that the model has now; None after fp4graph.remove()."""
        entries: dict[str, Any] = copy.deepcopy({key: value for key, value in vars(self).items() if key != "_model"})
        if self._model is None or (model := self._model()) is None:
            return entries if self.policy is not None else None
        if (runtime := runtime_of(model)) is None:
            return None
        settings = runtime.settings
        changed = {name: getattr(settings, name) for name in ("backend", "seed", "total_forwards")}
        return {**entries, **changed, "policy": runtime.policy.to_data()}

    def __getstate__(self) -> dict[str, Any]:  # weak references cannot be pickled
        state = {key: value for key, value in vars(self).items() if key != "_model"}
        return state | (self.to_dict() or {"policy": None})

    def __deepcopy__(self, memo: dict[int, Any]) -> FP4GraphConfig:
        """Return the config of the copied model; a config that is copied alone belongs to no model."""
        twin = copy.copy(self)
        if self._model is not None and (model := memo.get(id(self._model()))) is not None:
            twin._model = weakref.ref(model)
        return twin


@register_quantizer(_METHOD)  # type: ignore[untyped-decorator,unused-ignore]
class FP4GraphQuantizer(HfQuantizer):  # type: ignore[misc,unused-ignore]
    """Applies the policy of an :class:`FP4GraphConfig` once the weights are loaded."""

    folder: str = ""
    is_trainable = True
    is_qat_trainable = True

    def is_serializable(self) -> bool:
        """Return True: the saved folder is that of a plain model, with the state of techniques beside the weights."""
        return True

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **_: Any
    ) -> Any:
        self.folder = str(Path(checkpoint_files[0]).parent) if checkpoint_files else ""
        ignored = model._keys_to_ignore_on_load_unexpected or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, NAME}  # apply() reads these entries
        return model

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> Any:
        devices = {str(parameter.device) for parameter in model.parameters()}
        if len(devices) > 1 or "meta" in devices:
            raise Error(
                f"device_map put the weights on {', '.join(sorted(devices))} ('meta': not in memory), and a policy is "
                "applied to a model on one device: leave device_map out, or name one device"
            )
        # The stored weights are not quantized, as after apply(). If these marks stayed, transformers would refuse
        # model.float() and ignore the state_dict= of model.save_pretrained().
        del model.hf_quantizer, model.quantization_method
        model.is_quantized = False
        config: Any = copy.copy(self.quantization_config)  # the user's config may serve several models
        name = model.name_or_path
        try:  # apply() restores the techniques' state from the folder of the weights: a subfolder, or the hub's cache
            model.name_or_path = self.folder
            apply(model, config.policy, backend=config.backend, seed=config.seed, total_forwards=config.total_forwards)
        finally:
            model.name_or_path = name
        config._model = weakref.ref(model)
        model.config.quantization_config = config
        return model
