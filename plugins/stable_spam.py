"""StableSPAM: conditions gradients and resets moments around the user's own optimizer of Adam's kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from fp4graph import Error, Overhead, Technique, hookimpl
from fp4graph.technique import OptimizerHook, OptimizerStep, Part, SiteView
from fp4graph.training import conditioning, held_state, stable_spam

if TYPE_CHECKING:
    from torch import Tensor

SECOND_MOMENTS = {"exp_avg_sq", "exp_avg_var", "exp_inf"}
#: Entries that are not moments and that a reset keeps: the slow weights of timm's Lookahead.
KEPT = {"lookahead_slow_buff"}
#: Optimizers that cannot be reset: timm's ADOPT recognizes a first step by its missing state, which a reset keeps.
WITHOUT_RESET = {"Adopt"}
#: Keys in parameter groups: of t, and of the user's betas while a step lasts.
STEP, BETAS = "fp4graph.stable_spam.step", "fp4graph.stable_spam.betas"


class StableSpam(Technique):
    """Clips and normalizes gradients by their history, and periodically resets the moments of Adam.

    For each parameter with gradient G at step t = 1, 2, ... there are scalars m_max, m_norm and v_norm, all 0 at first.
    n is the number of gradients that they average, and c_t is the cosine from 1 to ``eta_min`` over ``total_steps`` (1
    if ``total_steps`` is null):

        AdaClip   m_max ← θ·m_max + (1 − θ)·max abs(G),     m̂_max = m_max/(1 − θ^n)
                  G_i ← G_i/max abs(G)·m̂_max  where abs(G_i) > m̂_max

        AdaGN     m_norm ← γ1·c_t·m_norm + (1 − γ1·c_t)·‖G‖,   m̂_norm = m_norm/(1 − (γ1·c_t)^n)
                  v_norm ← γ2·v_norm + (1 − γ2)·‖G‖²,         v̂_norm = v_norm/(1 − γ2^n)
                  G ← G/‖G‖ · m̂_norm/(√v̂_norm + eps)

        MoRet     the optimizer's moments and their step ← their initial values  where reset_interval divides t

    Then the user's optimizer steps with G, and with β1·c_t in place of β1. With AdamW this equals
    ``fp4graph.optim.StableSPAM``, whose docstring says what happens to gradients that are zero or not finite. All
    parameters of the optimizer are conditioned, whether they are quantized or not. ``p.grad`` holds the conditioned
    gradient afterwards.

    Source: Huang et al. 2025, "Stable-SPAM: How to Train in 4-Bit More Stably than 16-Bit Adam", and the authors' code
    with corrections, which the docstring of ``fp4graph.optim.StableSPAM`` lists. The authors' constructor has the same
    defaults; their training script has γ1 0.85, γ2 0.999, total_steps 20000 and reset_interval 500.

    Stage: optimizer, before and after the step of all parameters together.

    Cost: three passes over each gradient; four scalars per parameter. The complexity weight is 0.5.

    Use it with an optimizer of Adam's kind if spikes in the gradient make training in FP4 diverge. After
    ``clip_grad_norm_`` the technique follows the clipped norms.
    """

    name: ClassVar[str] = "stable_spam"
    overhead: ClassVar[Overhead] = Overhead("O(n)", "O(1)", fusable=False)
    complexity: ClassVar[float] = 0.5
    per_model: ClassVar[bool] = True

    gamma1: float = Field(0.7, ge=0, lt=1, description="γ1, the momentum of m_norm.")
    gamma2: float = Field(0.9, ge=0, lt=1, description="γ2, the momentum of v_norm.")
    theta: float = Field(0.999, ge=0, lt=1, description="θ, the momentum of m_max.")
    eps: float = Field(1e-8, ge=0, description="eps of AdaGN; the optimizer has Adam's eps.")
    total_steps: int | None = Field(None, ge=1, description="Steps of the whole training; null for c_t = 1.")
    eta_min: float = Field(0.5, ge=0, le=1, description="The final value of c_t.")
    reset_interval: int | None = Field(1000, ge=1, description="Steps between resets; null for none.")

    def parts(self, site: SiteView) -> tuple[Part, ...]:
        return (ConditionGradients(options=self),)


class ConditionGradients(OptimizerHook):
    """Conditions all gradients, and resets the moments."""

    options: StableSpam

    def before_optimizer(self, step: OptimizerStep) -> None:
        """Apply MoRet, AdaClip and AdaGN, and set the momentum for this step."""
        options, optimizer, groups = self.options, step.optimizer, step.optimizer.param_groups
        if isinstance(optimizer, stable_spam.StableSPAM):
            raise Error(
                "the optimizer is StableSPAM itself, and the policy's technique stable_spam would condition its "
                "gradients a second time; use torch.optim.AdamW, or take stable_spam out of the policy"
            )
        if not all("betas" in group for group in groups):
            raise _unfit(optimizer, "has no betas")
        if options.reset_interval is not None and type(optimizer).__name__ in WITHOUT_RESET:
            raise _unfit(optimizer, "cannot be reset (reset_interval: null leaves resets out)")
        for parameter, _ in step.parameters():
            assert parameter.grad is not None
            if parameter.grad.is_sparse or parameter.grad.is_complex():
                raise _unfit(optimizer, "holds a sparse or complex gradient")

        t = max(group.get(STEP, 0) for group in groups) + 1
        c = conditioning.cosine(t, options.total_steps, options.eta_min)
        for group in groups:
            # After a step that raised or was skipped, the user's betas are still under BETAS.
            first, *others = betas = group.get(BETAS, group["betas"])
            group.update({STEP: t, BETAS: betas, "betas": (first * c, *others)})
            if options.reset_interval is not None and t % options.reset_interval == 0:
                conditioning.reset_moments(group)  # timm's LAMB and Adan keep their step count in the group
                for parameter in group["params"]:
                    conditioning.reset_moments(optimizer.state.get(parameter, {}))

        factors = options.model_dump(include={"gamma2", "theta", "eps"}) | {"gamma1": options.gamma1 * c}
        memories: dict[Tensor, dict[str, Tensor]] = {}
        for parameter, _ in step.parameters():
            if (grad := parameter.grad) is not None and grad.numel():
                memories[grad] = step.memory(parameter)
                if not memories[grad]:
                    memories[grad].update(conditioning.new_statistics(grad))
        plain = [grad for grad in memories if type(grad) is torch.Tensor]
        for batch in conditioning.batches(plain):
            held = [memories[grad] for grad in batch]
            torch._foreach_copy_(batch, conditioning.condition_foreach(batch, held, **factors))
        for grad, memory in memories.items():
            if type(grad) is not torch.Tensor:  # a DTensor
                grad.copy_(conditioning.condition(grad, memory, **factors))

    def after_optimizer(self, step: OptimizerStep) -> None:
        """Restore the user's momenta, and check that the moments are known."""
        for group in step.optimizer.param_groups:
            group["betas"] = group.pop(BETAS)
        for parameter, _ in step.parameters():
            names = set(held_state.entries(step.optimizer, parameter))
            if not names:  # q_ramping has restored the state from before the first step
                continue
            if not names - conditioning.START.keys() <= KEPT or "exp_avg" not in names or not names & SECOND_MOMENTS:
                raise _unfit(step.optimizer, f"keeps {', '.join(sorted(map(str, names)))}")


def _unfit(optimizer: torch.optim.Optimizer, what: str) -> Error:
    return Error(
        f"technique stable_spam scales betas[0] and resets the moments exp_avg and exp_avg_sq, so it needs an "
        f"optimizer of Adam's kind; {type(optimizer).__name__} {what}. Use torch.optim.AdamW, "
        "or take stable_spam out of the policy"
    )


@hookimpl
def fp4graph_techniques() -> list[type[Technique]]:
    return [StableSpam]
