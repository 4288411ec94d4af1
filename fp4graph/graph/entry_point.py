"""The backend of ``torch.compile(model, backend="fp4graph")``, for policies without noise, state and phases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import GraphModule

from fp4graph.errors import PolicyError
from fp4graph.graph.backend import inner_backend
from fp4graph.graph.functions import cacheable
from fp4graph.graph.names import Names
from fp4graph.graph.rewrite import rewrite
from fp4graph.kernels.inductor import compiler_options
from fp4graph.policy import load_policy


def fp4graph_backend(
    gm: GraphModule, example_inputs: list[Any], *, options: dict[str, Any] | None = None, **_: Any
) -> Callable[..., Any]:
    """Rewrite ``gm`` under ``options["policy"]`` and compile it with ``options["backend"]`` (inductor by default).

    ``options["mode"]`` is torch.compile's mode, because torch takes either a mode or options. All other options go to
    Inductor.

    Raises:
        PolicyError: no policy is given; or the policy draws noise, keeps state or has phases, which need
            :func:`fp4graph.apply`.
        CaptureError: a site cannot be quantized as the policy says.
        Error: an option of the compiler is unknown or would break exactness.
    """
    settings = dict(options or {})
    policy, mode = settings.pop("policy", None), settings.pop("mode", None)
    backend = settings.pop("backend", "inductor")
    if policy is None:
        raise PolicyError(
            "torch.compile(backend='fp4graph') takes options={'policy': ..., 'backend': ..., 'mode': ...}, or "
            f"options of Inductor instead of a mode; got {', '.join(options or {}) or 'none'}"
        )
    compiler = compiler_options(backend, mode, settings, None)
    loaded = load_policy(policy)
    if loaded.phases:
        raise PolicyError(
            f"policy {loaded.name!r} has phases, which need a count of forwards; use fp4graph.apply", file=loaded.file
        )
    rewritten = rewrite(gm, loaded, Names(None), stateless=True)
    if rewritten.refused is not None:
        raise rewritten.refused
    with cacheable(gm):
        return inner_backend(backend, compiler)(gm, example_inputs)
