"""StableSPAM, the optimizer of 4-bit recipes: Adam on conditioned gradients, with its moments reset now and then."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp4graph import torch_internals
from fp4graph.training import conditioning


class StableSPAM(Optimizer):
    """Adam whose gradients are clipped and normalized by their own history, and whose moments are reset.

    A parameter W, of any shape, has a gradient G and moments M and V of its shape, and scalars m_max, m_norm and
    v_norm; moments and scalars are 0 at first. c_t falls from 1 to ``eta_min`` over ``total_steps``, as half a cosine;
    without ``total_steps`` it is 1. Step t = 1, 2, ... computes:

        W ← W·(1 - lr·weight_decay)

        AdaClip   m_max ← θ·m_max + (1 - θ)·max abs(G),     m̂_max = m_max/(1 - θ^n)
                  G_i ← G_i/max abs(G)·m̂_max  where abs(G_i) > m̂_max

        AdaGN     m_norm ← γ1·c_t·m_norm + (1 - γ1·c_t)·‖G‖,   m̂_norm = m_norm/(1 - (γ1·c_t)^n)
                  v_norm ← γ2·v_norm + (1 - γ2)·‖G‖²,         v̂_norm = v_norm/(1 - γ2^n)
                  G ← G/‖G‖ · m̂_norm/(√v̂_norm + eps)

        MoRet     M, V ← 0 and k ← 0  where reset_interval divides t

        Adam      k ← k + 1,  M ← β1·c_t·M + (1 - β1·c_t)·G,  V ← β2·V + (1 - β2)·G²
                  W ← W - lr/(1 - (β1·c_t)^k) · M/(√(V/(1 - β2^k)) + eps)

    n counts the gradients in this parameter's averages, k counts Adam's steps since the reset, and t counts the steps
    of the optimizer, whether or not the parameter had a gradient.

    Source: Huang et al. 2025, "Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit Adam", and the authors'
    code. Its constructor has the same defaults; its training script sets γ1 0.85, γ2 0.999, total_steps 20000 and
    reset_interval 500.

    This class corrects what seem to be mistakes of the authors' code. In that code:

    - k and n are one number, which the reset sets to 1. The averages keep their values, so for a while after a reset
      their bias correction is too strong: the clipping threshold is many times too high and the gradient too long.
    - the step of the reset still moves W by the old moments, with the bias correction of new moments. The new moments
      miss the gradient of this step: they enter the next step as zeros with k = 2.
    - the cosine climbs back to 1 past ``total_steps``.
    - averages have the dtype of the gradient: in bf16, m_max stops moving.

    Three more differences: ``p.grad`` stays unclipped, the position in the schedule is saved, and AMSGrad is left out.

    Cases that the equations leave open:

    - G = 0, or so small that ‖G‖ rounds to 0: AdaGN leaves G unchanged.
    - G has Inf or NaN, or ‖G‖ overflows: AdaGN makes the whole conditioned gradient NaN, and thereby all elements of W,
      M and V, so that a failed training shows. (With plain Adam only the elements concerned are lost.) m_max, m_norm,
      v_norm and n skip this gradient, as they do if only ‖G‖² overflows. So they are still valid once weights are
      restored and moments reset.
    - Parameters without a gradient and empty parameters are not updated; their moments are reset with the others.

    State of each parameter: ``step`` (k), ``exp_avg`` (M) and ``exp_avg_sq`` (V) as in torch's Adam, kept in the
    parameter's dtype; ``max_avg``, ``norm_avg``, ``norm_avg_sq`` and ``conditioned`` (n), 0-d, in fp32 at least. t is
    ``schedule_step`` of every parameter group; a group added later joins at the others' t. The conditioned gradient has
    the gradient's dtype; everything else is computed in fp32 at least and rounded once when it is stored.

    Args:
        lr: learning rate; a one-element tensor is read once per step and group, so keep it on the CPU.
        betas: β1 and β2. eps: the eps of Adam and of AdaGN. weight_decay: decoupled decay, as in AdamW.
        gamma1, gamma2: momenta of AdaGN's averages. theta: momentum of AdaClip's average (γ3 in the authors' code).
        total_steps: T, the number of steps of the training; c reaches ``eta_min`` at T + 1 and stays there.
        eta_min: the final value of c.
        reset_interval: steps between resets; None or 0 resets nothing.
        foreach: None or True update many parameters per call, which is several times faster; DTensors are still updated
            one by one. False updates all one by one. The results differ only by rounding: many contiguous parameters on
            a CPU take torch's fused AdamW.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        gamma1: float = 0.7,
        gamma2: float = 0.9,
        theta: float = 0.999,
        total_steps: int | None = None,
        eta_min: float = 0.5,
        reset_interval: int | None = 1000,
        foreach: bool | None = None,
    ) -> None:
        adam = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        averages = {"gamma1": gamma1, "gamma2": gamma2, "theta": theta}
        schedule = {"total_steps": total_steps, "eta_min": eta_min, "reset_interval": reset_interval}
        defaults = {**adam, **averages, **schedule, "foreach": foreach}
        _check(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, at the other groups' t; an option that it leaves out has the constructor's value.

        Raises:
            ValueError: an option is out of its range, or a parameter is complex.
        """
        at = max((group["schedule_step"] for group in self.param_groups), default=0)
        _check({**self.defaults, "schedule_step": at, **param_group})
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group.setdefault("schedule_step", at)
        if any(p.is_complex() for p in group["params"]):
            self.param_groups.pop()
            raise ValueError("StableSPAM takes real parameters; optimize torch.view_as_real(p) of a complex p")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of ``state_dict()``; the statistics keep their dtype even if the parameter has another."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for key, p in zip(saved, self._parameters(), strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if name in conditioning.STATISTICS:
                    # Optimizer.load_state_dict has cast the entry to the dtype of the parameter.
                    self.state[p][name] = value.detach().to(p.device, copy=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; ``closure`` computes the loss again and returns it.

        Raises:
            RuntimeError: a gradient is sparse; then no parameter has been updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if any(p.grad is not None and p.grad.is_sparse for p in self._parameters()):
            raise RuntimeError("StableSPAM needs dense gradients: the norm and Adam's moments are over all elements")
        for group in self.param_groups:
            group["schedule_step"] += 1
            params = [p for p in group["params"] if p.grad is not None and p.numel() > 0]
            interval = group["reset_interval"]
            if interval and group["schedule_step"] % interval == 0:
                for p in group["params"]:
                    conditioning.reset_moments(self.state.get(p, {}))
            many = [p for p in params if group["foreach"] is not False and type(p) in (Tensor, nn.Parameter)]
            for batch in conditioning.batches(many):
                _steps_foreach(batch, [self._state(p) for p in batch], group)
            together = {id(p) for p in many}
            for p in (p for p in params if id(p) not in together):
                _step_single(p, self._state(p), group)
        return loss

    def _parameters(self) -> Iterator[Tensor]:
        return chain.from_iterable(group["params"] for group in self.param_groups)

    def _state(self, p: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[p]
        if "step" not in state:
            assert p.grad is not None
            # On the CPU, as torch's Adam keeps it: bias corrections are Python numbers.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state.update(conditioning.new_statistics(p.grad))
        return state


def _options(group: Mapping[str, Any]) -> tuple[float, float, float, dict[str, float]]:
    """Return lr, β1·c and β2 of this step, and the options of :func:`conditioning.condition`."""
    c = conditioning.cosine(group["schedule_step"], group["total_steps"], group["eta_min"])
    beta1, beta2 = group["betas"]
    options = {name: group[name] for name in ("gamma2", "theta", "eps")} | {"gamma1": group["gamma1"] * c}
    return float(group["lr"]), beta1 * c, beta2, options


def _step_single(p: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
    """Apply the equations to one parameter, line by line."""
    assert p.grad is not None
    lr, beta1, beta2, options = _options(group)
    grad = conditioning.condition(p.grad, state, **options)
    state["step"] += 1
    k = state["step"].item()
    # In low precision these are copies, so that stored values are rounded once; else they are the tensors themselves.
    dtype = conditioning.precision(p)
    w, g, m, v = (x.to(dtype) for x in (p, grad, state["exp_avg"], state["exp_avg_sq"]))
    w.mul_(1 - lr * group["weight_decay"])
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    denominator = v.sqrt().div_(math.sqrt(1 - beta2**k)).add_(group["eps"])
    w.addcdiv_(m, denominator, value=-lr / (1 - beta1**k))
    if dtype != p.dtype:
        for stored, value in ((p, w), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
            stored.copy_(value)


def _steps_foreach(params: list[Tensor], states: list[dict[str, Tensor]], group: Mapping[str, Any]) -> None:
    """Apply the equations to many parameters of one device and dtype, contiguous or not."""
    lr, beta1, beta2, options = _options(group)
    decay, eps = group["weight_decay"], group["eps"]
    grads = conditioning.condition_foreach([p.grad for p in params if p.grad is not None], states, **options)
    steps, m, v = ([state[name] for state in states] for name in ("step", "exp_avg", "exp_avg_sq"))
    torch._foreach_add_(steps, torch.ones(()), alpha=1)  # a number would become a tensor for each parameter
    if conditioning.on_cpu(params[0]) and all(x.is_contiguous() for x in chain(params, grads, m, v)):
        # It makes one pass instead of the calls below, and reads memory in order, whatever the strides.
        adam = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
        torch_internals.fused_adamw(params, grads, m, v, steps, weight_decay=decay, **adam)
        return
    counts = [step.item() for step in steps]  # on the CPU: nothing to wait for
    dtype = conditioning.precision(params[0])
    stored = (params, m, v)
    params, grads, m, v = ([x.to(dtype) for x in tensors] for tensors in (params, grads, m, v))
    if decay != 0:
        torch._foreach_mul_(params, 1 - lr * decay)
    torch._foreach_lerp_(m, grads, 1 - beta1)
    torch._foreach_mul_(v, beta2)
    torch._foreach_addcmul_(v, grads, grads, 1 - beta2)
    denominators = torch._foreach_sqrt(v)
    torch._foreach_div_(denominators, [math.sqrt(1 - beta2**k) for k in counts])
    torch._foreach_add_(denominators, eps)
    torch._foreach_addcdiv_(params, m, denominators, [-lr / (1 - beta1**k) for k in counts])
    if dtype != stored[0][0].dtype:
        for tensors, values in zip(stored, (params, m, v), strict=True):
            torch._foreach_copy_(tensors, values)


def _check(options: Mapping[str, Any]) -> None:
    """Raise ValueError for the first option that is out of its range."""

    def require(name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ValueError(f"StableSPAM: {name} must be {what}; got {options[name]!r}")

    lr = options["lr"]
    scalar = not isinstance(lr, Tensor) or lr.numel() == 1
    require("lr", scalar and _is_number(lr) and 0 <= float(lr) < math.inf, "a finite number of at least 0")
    betas = options["betas"]
    pair = isinstance(betas, Sequence) and len(betas) == 2
    require("betas", pair and all(_is_number(b) and 0 <= b < 1 for b in betas), "two numbers of [0, 1)")
    for name in ("gamma1", "gamma2", "theta"):
        require(name, _is_number(options[name]) and 0 <= options[name] < 1, "a number of [0, 1)")
    for name in ("eps", "weight_decay"):
        require(name, _is_number(options[name]) and 0 <= options[name] < math.inf, "a finite number of at least 0")
    require("eta_min", _is_number(options["eta_min"]) and 0 <= options["eta_min"] <= 1, "a number of [0, 1]")
    total, interval = options["total_steps"], options["reset_interval"]
    require("total_steps", total is None or (_is_count(total) and total > 0), "a whole number of at least 1, or None")
    require("reset_interval", interval is None or _is_count(interval), "a whole number of at least 0, or None")
    require("foreach", options["foreach"] in (None, True, False), "True, False or None")
    if "schedule_step" in options:
        require("schedule_step", _is_count(options["schedule_step"]), "a whole number of at least 0")


def _is_number(x: object) -> bool:
    return isinstance(x, int | float | Tensor) and not isinstance(x, bool)


def _is_count(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0
