"""Prepares a model for a policy: plans its weights, then adds state and the hooks that mark modules for the graph pass.

Planning changes nothing, so a refused policy leaves the model unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from fp4graph.errors import CaptureError, PolicyError
from fp4graph.graph.marker import Tag
from fp4graph.graph.names import Names
from fp4graph.graph.plan import Plan
from fp4graph.graph.products import is_quantized_elsewhere
from fp4graph.graph.refusals import rule_that_keeps
from fp4graph.model import hooks, siblings, state
from fp4graph.model.current import CurrentForward
from fp4graph.model.source import Source, as_parameters, sources_below
from fp4graph.model.weight import PlannedWeight, Weight
from fp4graph.numerics.sharding import like
from fp4graph.policy import Policy, Rule
from fp4graph.technique import Technique
from fp4graph.technique.site import SiteView

#: The attribute of a module under DDP that lists the buffers which DDP leaves alone.
_IGNORED = "_ddp_params_and_buffers_to_ignore"
_RELOAD = "load the original weights and apply the policy again"


class PhasePlan:
    """The weights and techniques of a model while one phase of the policy lasts.

    Args:
        policy: the policy of this phase, itself without phases.
        names: the names of the root's modules; None collects them.

    Attributes:
        weights: every weight that a rule quantizes, or may quantize. If its module has several names, it is here once,
            under the first name for which a rule does so.
        groups: the weights that share a tensor scale.
    """

    def __init__(self, root: nn.Module, policy: Policy, names: Names | None = None) -> None:
        self.root, self.policy = root, policy
        state.require_free(root)
        with as_parameters(root):
            self.names = Names(root) if names is None else names
            weights: dict[tuple[nn.Module, str], Weight] = {}
            for fqn, module in root.named_modules(remove_duplicate=False):
                for name, parameter in module._parameters.items():
                    weight = None if (module, name) in weights else self._weight(fqn, module, name, parameter)
                    if weight is not None:
                        weights[module, name] = weight
            self.weights = list(weights.values())
            self.groups = siblings.groups_of(root, self.weights)

    @property
    def sources(self) -> list[Source]:
        """The sources of the weights that are not parameters now."""
        return [source for weight in self.weights if (source := weight.source) is not None]

    def before_training(self) -> None:
        """Let the sources warn, before a training forward, about packed weights that stay frozen."""
        for warn in {source.before_training for source in self.sources}:
            warn()

    def require_sources(self) -> None:
        """Raise PolicyError if the plan needs other values of a weight than the weight's source gives."""
        weights = {(id(weight.module), weight.parameter_name): weight for weight in self.weights}
        for module, source in sources_below(self.root):
            if (weight := weights.get((id(module), source.name))) is None:
                raise PolicyError(
                    f"{source.path} was packed and no rule quantizes it now, but its high-precision values are gone; "
                    f"{_RELOAD}"
                )
            for choice in weight.choices:
                if choice.plan.program not in source.programs:
                    raise choice.rule.error(
                        f"{weight.name} was packed under another rule or phase, and the rule and phase in force need "
                        f"its high-precision values, which are gone; {_RELOAD}"
                    )
            source.path = weight.name

    def _weight(self, fqn: str, module: nn.Module, name: str, parameter: Tensor | None) -> Weight | None:
        """Return ``parameter`` as a weight that a rule quantizes or may quantize, else None."""
        if parameter is None or isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return None
        convolves = isinstance(module, nn.Conv1d | nn.Conv2d) and name == "weight"
        if parameter.dim() == 3 and not convolves:
            return self._experts(fqn, module, name, parameter)
        if not convolves and (parameter.dim() != 2 or not (name == "weight" or name.endswith("_weight"))):
            return None
        if is_quantized_elsewhere(parameter):
            return None
        transposed = type(module).__name__ == "Conv1D"
        out_features, in_features = parameter.shape[0], parameter.shape[1:].numel()
        if transposed:
            out_features, in_features = in_features, out_features
        op = "conv" if convolves else "linear"
        view = self.names.view(fqn, op, (in_features, out_features, parameter.numel()), parameter=name)
        weight = self._planned_weight(fqn, module, name, [view], transposed)
        if weight is not None and parameter.layout is not torch.strided:
            raise CaptureError(
                f"it is sparse ({parameter.layout}), and quantizers take dense tensors; make it dense (to_dense()), or "
                f"{rule_that_keeps(op, fqn)}",
                site=weight.place,
            )
        return weight

    def _experts(self, fqn: str, module: nn.Module, name: str, parameter: Tensor) -> Weight | None:
        """Return ``parameter [E, N, K]`` or ``[E, K, N]`` as the weights of experts; only a graph shows which layout it
        has, and whether experts use it at all."""
        if min(parameter.shape) < 2 or type(module).__module__.startswith("torch.nn.modules"):
            return None
        last, first = parameter.shape[-1], parameter.shape[-2]
        sizes = [(last, first, parameter.numel()), (first, last, parameter.numel())]
        views = [self.names.view(fqn, "grouped", each, parameter=name) for each in sizes]
        try:
            return self._planned_weight(fqn, module, name, views, transposed=False)
        except CaptureError:  # raised again if a graph has such a product
            return None

    def _planned_weight(
        self, fqn: str, module: nn.Module, name: str, views: Sequence[SiteView], transposed: bool
    ) -> Weight | None:
        """Return the weight with its possible decisions; None if none of them quantizes it."""
        possible: dict[tuple[Rule, Plan], PlannedWeight] = {}
        for site, decision in (pair for view in views for pair in self.policy.decide_weight(view)):
            planned = PlannedWeight.of(site, decision.rule)
            possible.setdefault((planned.rule, planned.plan), planned)
        if all(planned.plan.program is None for planned in possible.values()):
            return None
        return Weight(module, fqn, name, tuple(possible.values()), transposed)

    def hosts(self) -> set[str]:
        """Return the names of modules that may multiply activations with each other, or use parameters directly, under
        a rule that quantizes such products."""
        hosts = set()
        weight_owners = {weight.module for weight in self.weights}
        for fqn, module in self.root.named_modules(remove_duplicate=False):
            inside_torch = type(module).__module__.startswith("torch.nn.modules")
            attends = isinstance(module, nn.MultiheadAttention)
            computes = computes_weight(module)
            if inside_torch and not attends and not computes:
                continue
            if isinstance(module, parametrize.ParametrizationList):
                continue  # it also computes a weight that is read outside of a forward
            owns = computes or module in weight_owners
            owns = owns or any(p is not None and p.dim() >= 2 for p in module._parameters.values())
            ops = ("matmul", "sdpa", *(("linear", "grouped", "conv") if owns or attends else ()))
            if any(self.policy.may_quantize(self.names.view(fqn, op)) for op in ops):
                hosts.add(fqn)
        return hosts

    def techniques(self) -> tuple[Technique, ...]:
        """Return the techniques that some rule uses, and those that act on the model as a whole."""
        rules = (*self.policy.rules, self.policy.default)
        of_rules = [t for rule in rules if rule.quantizes for t in rule.techniques]
        return tuple(dict.fromkeys((*of_rules, *(t for t in self.policy.techniques if t.per_model))))


def computes_weight(module: nn.Module) -> bool:
    """Return whether ``module`` computes a weight, as after weight_norm, spectral_norm or pruning."""
    attributes = vars(module).items()
    plain = any(isinstance(value, Tensor) for name, value in attributes if name.endswith("weight"))
    return plain or parametrize.is_parametrized(module)


def device_of(module: nn.Module, default: torch.device | None = None) -> torch.device:
    """Return the device of the first parameter of ``module``. Without parameters, return ``default``; if that is None,
    the device of the first buffer, or the CPU."""
    tensors = module.parameters() if default is not None else chain(module.parameters(), module.buffers())
    return next((tensor.device for tensor in tensors), default or torch.device("cpu"))


def prepare(
    plan: PhasePlan, policy: Policy, current: CurrentForward, earlier: Mapping[str, Tensor]
) -> state.RootState | None:
    """Add state and hooks to the model of ``plan``; return the root's state, or None if no phase quantizes anything.

    Args:
        plan: the plan of the phase in force.
        policy: the whole policy. Modules have keys and hooks in every phase if any phase needs them; state of weights
            exists in the phases that need it.
        current: the forward whose step the hooks hand to the graph.
        earlier: state-dict entries of an earlier application; those that fit are taken over.
    """
    if not (plan.policy.quantizes or policy.phases):
        return None
    root = plan.root
    device = device_of(root)
    planned: dict[str, list[Weight]] = {}
    for weight in plan.weights:
        planned.setdefault(weight.fqn, []).append(weight)
    phases = range(len(policy.phases) + 1) if policy.phases else ()
    plans = [PhasePlan(root, policy.in_phase(phase), plan.names) for phase in phases]
    hosts = {*plan.hosts(), *(host for each in plans for host in (*each.hosts(), *(w.fqn for w in each.weights)))}
    modules = list(root.named_modules(remove_duplicate=False))
    root_state = state.RootState(root, device)
    for fqn, module in modules:
        module_state = state.State.of(module)
        if (fqn in planned or fqn in hosts) and (module_state is None or not module_state.has_sites):
            module_state = module_state or state.State(module, fqn)
            module_state.add_key(device_of(module, device))
            for weight in planned.get(fqn, ()):
                weight.add_entries(module_state)
    _note_ties(plan)
    _note_entries(plans)
    numbers: dict[tuple[Plan, ...], int] = {}
    for fqn, module in modules:
        module_state = state.State.of(module)
        if module_state is not None and module_state.has_sites and module_state.fqn == fqn:  # once for all its names
            tag, entries = _tag(plan, fqn, module, planned, numbers)
            # This hook runs after hooks that set up weights: FSDP gathers them, weight normalization computes them.
            module.register_forward_pre_hook(hooks.MarkHook(current, fqn, tag, entries))
    if "" in planned:
        root.forward = hooks.GuardedForward(root, current)
    _take_over(root, root_state, earlier)
    names = [name for name, _ in root.named_buffers() if state.is_ours(name)]
    # DDP would overwrite every rank's counters and EMAs with rank 0's at each forward.
    setattr(root, _IGNORED, [*getattr(root, _IGNORED, []), *names])
    return root_state


def add_host(plan: PhasePlan, module: nn.Module, fqn: str, current: CurrentForward) -> hooks.MarkHook | None:
    """Give a key and a mark hook to a module that a graph has shown to multiply with a tensor it computes, such as the
    weight of a hypernetwork; return the hook, or None if the module has a mark hook already."""
    if hooks.is_marked(module):
        return None
    module_state = state.State.of(module) or state.State(module, fqn)
    if not module_state.has_sites:
        module_state.add_key(device_of(module, device_of(plan.root)))
    hook = hooks.MarkHook(current, fqn, *_tag(plan, fqn, module, {}, {}))
    if (sharded := hooks.sharded_forward(module)) is None:
        module.register_forward_pre_hook(hook)
    else:
        sharded.hook = hook
    return hook


def unprepare(root: nn.Module, current: CurrentForward | None = None) -> None:
    """Undo :func:`prepare`; with ``current``, leave modules that another applied model has taken over."""
    marked = hooks.mark_hooks(root) if current is not None else ()
    hooks.remove_hooks(root, {module for module, _, hook in marked if hook.current not in (None, current)})
    if ignored := [name for name in root.__dict__.pop(_IGNORED, []) if not state.is_ours(name)]:
        setattr(root, _IGNORED, ignored)


def _note_ties(plan: PhasePlan) -> None:
    """Tell each module that has a planned weight, such as an embedding tied to the head, which states have entries for
    the weight."""
    tied: dict[int, list[state.State]] = {}
    for weight in plan.weights:
        if weight.slots and (module_state := state.State.of(weight.module)) is not None:
            tied.setdefault(id(weight.stored), []).append(module_state)
    for fqn, module in plan.root.named_modules():
        if of_module := dict.fromkeys(each for p in module._parameters.values() for each in tied.get(id(p), ())):
            (state.State.of(module) or state.State(module, fqn)).tied = list(of_module)


def _note_entries(plans: Sequence[PhasePlan]) -> None:
    """Tell the states of modules which entries only some phases keep; ``plans`` are those of all phases."""
    entries = [
        {(weight.module, weight.buffer(slot)) for weight in plan.weights for slot in weight.slots if not slot.shared}
        for plan in plans
    ]
    for module, name in set[tuple[nn.Module, str]]().union(*entries):
        module_state = state.State.of(module)
        if module_state is not None and not all((module, name) in each for each in entries):
            module_state.of_phases.add(name)


def _tag(
    plan: PhasePlan,
    fqn: str,
    module: nn.Module,
    planned: Mapping[str, list[Weight]],
    numbers: dict[tuple[Plan, ...], int],
) -> tuple[Tag, tuple[str, ...]]:
    """Return the static part of a module's mark, and the attribute paths of the state that the mark carries.

    The mark carries the weights of children that the module uses without a call. ``numbers`` gives each distinct plan
    of the model a number; it is filled in here.
    """
    carried = [(weight.parameter_name, weight) for weight in planned.get(fqn, ())]
    if isinstance(module, nn.MultiheadAttention):
        child = f"{fqn}.out_proj" if fqn else "out_proj"
        carried += [(f"out_proj.{weight.parameter_name}", weight) for weight in planned.get(child, ())]
    entries, paths = [], []
    for index, (path, weight) in enumerate(carried):
        for slot in weight.slots:
            entries.append((index, slot.technique, slot.label))
            paths.append(f"{path.rpartition('.')[0]}.{weight.buffer(slot)}".removeprefix("."))
    choices = [tuple(choice.plan for choice in weight.possible) for _, weight in carried]
    plans = tuple(numbers.setdefault(choice, len(numbers)) for choice in choices)
    rules = plan.policy.places(plan.names.view(fqn, "linear"))
    return Tag(rules, tuple(path for path, _ in carried), tuple(entries), plans), tuple(paths)


def _take_over(root: nn.Module, root_state: state.RootState, earlier: Mapping[str, Tensor]) -> None:
    """Copy the values of an earlier applied policy where name and shape fit, as when a deepcopy is applied again, and
    let values of entries of other phases wait."""
    buffers = dict(root.named_buffers(remove_duplicate=False))
    for key, value in earlier.items():
        if key in buffers and buffers[key].shape == value.shape:
            buffers[key].copy_(like(value.to(buffers[key].device), buffers[key]))
    for module_state in state.states(root):
        names = {*module_state.buffers, *module_state.of_phases}
        keys = {name: f"{module_state.fqn}.{name}".removeprefix(".") for name in names}
        own = {name: earlier[key] for name, key in keys.items() if key in earlier}
        module_state.waiting = {name: value for name, value in own.items() if name not in module_state.buffers}
        module_state.loaded = len(own) > len(module_state.waiting)
    if state.FORWARDS in earlier:
        root_state.recount()
