"""Reports what a policy would quantize in a model, without changing the model."""

from __future__ import annotations

import copy
import dataclasses
import io
import random
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from fp4graph import targets, torch_internals
from fp4graph.errors import CaptureError, Error, PolicyWarning
from fp4graph.graph import flops
from fp4graph.graph.nested import nested
from fp4graph.graph.site import Site
from fp4graph.html import html, page
from fp4graph.model import census, coverage, hooks
from fp4graph.model.apply_options import ApplyOptions
from fp4graph.model.conversion import refuse_other_models
from fp4graph.model.current import PLAIN
from fp4graph.model.distributed import unwrapped
from fp4graph.model.runtime import Runtime, detach
from fp4graph.model.source import release_all
from fp4graph.policy import Policy, load_policy
from fp4graph.policy.words import describe, summarize
from fp4graph.technique.site import BlockPosition
from fp4graph.torch_internals import pytree


@dataclass(frozen=True)
class Explanation:
    """The sites of a model under a policy; ``str()``, and the last line of a notebook's cell, show a table.

    Attributes:
        policy: the resolved policy.
        sites: every place of matrix work, in graph order.
        blocks: the position of each module in a repeated stack.
        problem: the error that training under this policy would raise, or the report that torch counts FLOPs which no
            site has; None without either.
        graphs: the number of graphs that the forward was captured in.
        siblings: the names of the weights of each group that shares a tensor scale.
    """

    policy: Policy
    sites: tuple[Site, ...]
    blocks: Mapping[str, BlockPosition]
    problem: str | None
    graphs: int
    siblings: tuple[tuple[str, ...], ...] = ()

    @property
    def quantized(self) -> int:
        """The number of quantized sites."""
        return sum(site.quantized for site in self.sites)

    @property
    def flops(self) -> int:
        """The FLOPs of one forward, summed over all sites where they are known."""
        return sum(site.flops or 0 for site in self.sites)

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """The FLOPs of one forward that are quantized, kept and not supported, each by rule or kind of operation."""
        return census.totals(self.sites)

    def share(self, site: Site) -> float | None:
        """Return the share of the FLOPs of one forward at ``site``; None where they are unknown."""
        return None if site.flops is None or not self.flops else site.flops / self.flops

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return html(self._table(every=False), *self._summary)

    def to_html(self, *, target: str | None = None) -> str:
        """Return a page: the summary and the table of sites, and behind a click each site by itself and the code that
        quantizes; with ``target`` also what runs natively there. The page needs no other file and no network."""
        folded = {
            "Every site": html(self._table(every=True)),
            "The code that quantizes each operand on this machine": html(self._schedule(every=False)),
        }
        if target is not None:
            native = html(self._on(target, every=False), targets.summary(target, self.sites))
            folded = {f"On {targets.target(target).title}": native, **folded}
        body = html(*self._summary, self._table(every=False))
        return page(f"{self.policy.name}: {self.quantized} of {len(self.sites)} sites quantized", body, folded)

    def schedule(self, *, every: bool = False) -> str:
        """Return a table of the code that quantizes each operand of the quantized sites, with reasons. Equal sites of
        repeated blocks share a line, unless ``every`` is set."""
        nothing = [] if self.quantized else ["nothing is quantized; without the schedule the table says why"]
        return _printed(self._schedule(every=every), *nothing, *self._problem)

    def _schedule(self, *, every: bool) -> Table:
        table = Table(title=f"{self.policy.name}: how operands are quantized", title_justify="left")
        for column in ("module", "operand", "by", "because", "kept for the backward"):
            table.add_column(column, overflow="fold")

        def rows(site: Site) -> list[tuple[str, ...]]:
            lines = [] if site.schedule is None else site.schedule.lines()
            return [(line.what, line.by, line.why, ", ".join(line.keeps)) for line in lines]

        quantized = [site for site in self.sites if site.quantized]
        _fill(table, self._lines(quantized, every=every, schedules=True), rows)
        return table

    def on(self, target: str, *, every: bool = False) -> str:
        """Return a table of the GEMMs that run natively on a target, such as "b200" or "te", and why others would not.
        Equal sites of repeated blocks share a line, unless ``every`` is set.

        Raises:
            Error: there is no such target; docs/targets.md lists them.
        """
        return _printed(self._on(target, every=every), targets.summary(target, self.sites), *self._problem)

    def _on(self, target: str, *, every: bool) -> Table:
        chosen = targets.target(target)
        table = Table(title=f"{self.policy.name} on {chosen.title}", title_justify="left")
        for column in ("module", "GEMM", "", "why"):
            table.add_column(column, overflow="fold")

        def rows(site: Site) -> list[tuple[str, ...]]:
            return [(str(gemm), *verdict) for gemm, verdict in targets.verdicts(target, site.program, site).items()]

        _fill(table, self._lines([site for site in self.sites if site.quantized], every=every), rows)
        return table

    @property
    def _problem(self) -> list[str]:
        return [f"problem: {self.problem}"] if self.problem else []

    def _lines(
        self, sites: Sequence[Site], *, every: bool, schedules: bool = False
    ) -> list[tuple[str, tuple[Site, ...]]]:
        """Return the names of lines with their sites."""
        if every:
            return [("(root)" if site.module == "" else site.module or "-", (site,)) for site in sites]
        return census.folded(sites, schedules=schedules)

    def table(self, *, every: bool = False) -> str:
        """Return a table of the sites. Equal sites of repeated blocks share a line, unless ``every`` is set."""
        return _printed(self._table(every=every), *self._summary)

    @property
    def _summary(self) -> list[str]:
        summary = "; ".join([census.summary(self.sites), *census.techniques(self.sites)])
        more = *census.on_gpu(self.sites), *census.shared(self.siblings)
        return [_blocks(self.blocks), summary, *more, *self._problem]

    def _table(self, *, every: bool) -> Table:
        table = Table(
            title=f"{self.policy.name}: {self.quantized} of {len(self.sites)} sites quantized", title_justify="left"
        )
        for column in ("module", "op", "shapes"):
            table.add_column(column, overflow="fold")
        table.add_column("FLOPs", justify="right", no_wrap=True)
        for column in ("rule", "operands or reason"):
            table.add_column(column, overflow="fold")
        previous = None
        for name, sites in self._lines(self.sites, every=every):
            site = sites[0]
            shapes = " @ ".join("×".join(map(str, shape)) for shape in site.shapes)
            decision = summarize(site.operands) if site.quantized else site.reason
            if site.apart_channels:
                decision += f"; {site.apart_channels} of {site.shapes[0][-1]} input channels: {summarize(site.apart)}"
            previous, decision = decision, "as above" if decision == previous else decision
            share = "-" if site.flops is None else census.percent(site.flops * len(sites), self.flops)
            table.add_row(name, site.op, shapes, share, site.rule or "-", decision)
        return table

    def to_json(self, *, schedule: bool = False, target: str | None = None) -> dict[str, Any]:
        """Return the explanation as plain data, with ``schedule`` also which code quantizes each operand, with
        ``target`` the verdict of each GEMM there."""
        return {
            "policy": self.policy.name,
            "quantized": self.quantized,
            "graphs": self.graphs,
            "problem": self.problem,
            "flops": self.flops,
            "totals": self.totals,
            "siblings": self.siblings,
            "sites": [
                {name: getattr(site, name) for name in ("module", "op", "rule", "reason", "quantized", "flops")}
                | {"standing": site.standing, "share": self.share(site)}
                | {"shapes": [list(shape) for shape in site.shapes]}
                | {"operands": {operand.value: describe(spec) for operand, spec in site.operands.items()}}
                | {"techniques": list(site.techniques)}
                | {"exact": [gemm.value for gemm in site.exact], "apart_channels": site.apart_channels}
                | {"apart": {operand.value: describe(spec) for operand, spec in site.apart.items()}}
                | ({"schedule": {} if site.schedule is None else site.schedule.to_json()} if schedule else {})
                | ({} if target is None else {"target": targets.to_json(target, site)})
                for site in self.sites
            ],
        }


def explain(model: nn.Module, policy: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Explanation:
    """Capture ``model(*args, **kwargs)`` on fake tensors and report every site; model and RNG stay untouched.

    Args:
        model: applied or not; its train or eval mode is used as it is.
        policy: as for :func:`fp4graph.apply`. The first phase of a policy with phases is shown; to see a later one,
            pass ``policy.phases[i].policy``.
        args: arguments of the forward call: a tuple or list, a mapping of keywords, or a single argument. Only shapes
            and dtypes matter.
        kwargs: keyword arguments of the call, beside positional ``args``.

    Raises:
        PolicyError: the policy cannot be loaded. CaptureError: a site cannot be planned under the policy.
    """
    refuse_other_models(model, "explain")
    loaded = dataclasses.replace(load_policy(policy), phases=())
    recurrent: dict[str, int] = {}
    counts: dict[str, int] = {}
    args, keywords = _arguments(args)
    keywords |= kwargs or {}
    runtime, problem = _captured(model, loaded, args, keywords, recurrent=recurrent, counts=counts)
    blocks = runtime.plan.names.blocks
    served = coverage.served_sites(runtime.plan.root, runtime.capture)
    sites = [dataclasses.replace(site, module=name) for site, names in served for name in names]
    sites = [
        dataclasses.replace(s, flops=recurrent.get(str(s.module))) if s.op == "recurrent" and s.flops is None else s
        for s in sites
    ]
    problem = problem or _missing(sites, counts)
    text = None if problem is None else str(problem)
    groups = tuple(tuple(w.name for w in group.weights.values()) for group in runtime.plan.groups)
    return Explanation(loaded, tuple(sites), blocks, text, runtime.capture.graphs, tuple(g for g in groups if g[1:]))


def _missing(sites: Sequence[Site], counts: Mapping[str, int]) -> Error | None:
    """Return an error if ``sites`` lack FLOPs that torch has counted in the forward, else None.

    Sites may have more FLOPs: torch does not count products with vectors, for one. Recurrent layers are left out,
    because torch's count of them depends on the device.
    """
    recurrent = {site.module: site.flops or 0 for site in sites if site.op == "recurrent"}
    listed = sum(site.flops or 0 for site in sites) - sum(recurrent.values())
    counted = counts.get("", 0) - sum(counts.get(str(name), 0) for name in recurrent)
    if counted <= listed or any(site.flops is None for site in sites):
        return None
    modules = {site.module for site in sites}
    inner = {name.rpartition(".")[0] for name in counts}
    names = [name for name, flops in counts.items() if flops and name not in modules | inner]
    return CaptureError(
        f"torch counts {counted} FLOPs of matrix products in this forward, and the listed sites have {listed}; the "
        f"others ({', '.join(names[:3]) or 'in the same modules'}) run outside of the captured graphs in "
        "high precision, as after a graph break in a loop or a try. Remove what breaks the graph there; "
        "TORCH_LOGS=graph_breaks shows it",
    )


def rehearse(model: nn.Module, policy: Policy, example_inputs: Any, *, strict: bool) -> None:
    """Run one forward and backward of every phase of ``policy`` on fake tensors; raise the first error of a training.

    The model stays untouched. ``example_inputs`` are a tuple or list, a mapping of keywords, or a single argument.
    """
    args, kwargs = _arguments(example_inputs)
    for in_phase in (dataclasses.replace(policy, phases=()), *(phase.policy for phase in policy.phases)):
        _, problem = _captured(model, in_phase, args, kwargs, backward=True, strict=strict)
        if problem is not None:
            raise problem


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments in a tuple or list, a mapping of keywords, or a single argument."""
    if isinstance(inputs, Mapping):
        if (key := next((key for key in inputs if not isinstance(key, str)), None)) is not None:
            raise Error(f"keys of a mapping of inputs must be names of forward's inputs; got {key!r}")
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _captured(
    model: nn.Module,
    policy: Policy,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    backward: bool = False,
    strict: bool = False,
    recurrent: dict[str, int] | None = None,
    counts: dict[str, int] | None = None,
) -> tuple[Runtime, Error | None]:
    """Return a runtime that has captured a fake copy of ``model``, and the error that training it would raise.

    ``recurrent`` is filled with the forward FLOPs of the recurrent layers, which no graph shows, by their names, and
    ``counts`` with the FLOPs that torch counts in the forward where nothing is captured (:func:`flops.of_call`).
    """
    python_state = random.getstate()
    twin, fake_mode, (fake_args, fake_kwargs) = _fake(model, (args, dict(kwargs)))
    counting = [] if recurrent is None else _count_recurrent(twin, recurrent)
    runtime = Runtime(twin, policy, ApplyOptions("eager", strict=strict), explains=True)
    try:
        with torch.random.fork_rng(), fake_mode, warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyWarning)  # training warns about uncompiled modules too
            runtime.attach()
            result = twin(*fake_args, **fake_kwargs)
            outputs = [leaf for leaf in nested(result, torch.Tensor) if backward and leaf.requires_grad]
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    except TypeError as error:
        given = f"{len(args)} positional inputs and the keywords {list(kwargs)}"
        error.add_note(f"forward() was called with {given}; args of explain(), or example_inputs, are its inputs")
        raise
    except (torch_internals.DataDependentOutputException, torch_internals.DynamicOutputShapeException) as error:
        raise CaptureError(
            f"the forward depends on the values of tensors ({error.func}), which the fake tensors of explain() and "
            "example_inputs do not have; leave example_inputs out to see errors at the first call instead. A loop over "
            "experts trains quantized but uncompiled; model.set_experts_implementation('grouped_mm') makes the experts "
            "of Hugging Face's models independent of values, and faster"
        ) from error
    finally:
        random.setstate(python_state)
        runtime.capture.forget()
    problem = next(iter(runtime.capture.problems), None)
    try:
        runtime.check_coverage()
    except Error as error:
        problem = problem or error
    for handle in counting:
        handle.remove()
    if counts is not None:
        with torch.random.fork_rng(), fake_mode, hooks.bypassed(twin), warnings.catch_warnings():
            warnings.simplefilter("ignore", PolicyWarning)
            call: Any = twin._call_impl
            counts.update(flops.of_call(lambda: call(*fake_args, **fake_kwargs)) or {})
    return runtime, problem


def _fake(model: nn.Module, inputs: Any) -> tuple[nn.Module, torch_internals.FakeTensorMode, Any]:
    """Return a plain copy of ``model``, the fake mode, and ``inputs``; copy and inputs are on fake tensors."""
    fake_mode = torch_internals.FakeTensorMode(allow_non_fake_inputs=True)
    with torch.random.fork_rng(), torch_internals.FakeCopyMode(fake_mode):
        twin = copy.deepcopy(unwrapped(model), {PLAIN: True})
    release_all(twin)
    detach(twin)
    twin._compiled_call_impl = None
    device = next((tensor.device for tensor in nested(inputs, torch.Tensor) if not tensor.is_meta), torch.device("cpu"))
    _leave_meta(twin, fake_mode, device)
    return twin, fake_mode, pytree.tree_map_only(torch.Tensor, lambda t: _placed(t, fake_mode, device), inputs)


def _leave_meta(model: nn.Module, fake_mode: torch_internals.FakeTensorMode, device: torch.device) -> None:
    """Put the fake tensors of ``model`` that are on the meta device on ``device``, where its inputs are."""
    placed: dict[int, torch.Tensor] = {}  # tied parameters stay tied
    for module in model.modules():
        holders: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
        for held in holders:
            for name, value in list(held.items()):
                if isinstance(value, torch.Tensor) and value.device.type == "meta":
                    held[name] = placed.setdefault(id(value), _placed(value, fake_mode, device))


def _count_recurrent(model: nn.Module, counts: dict[str, int]) -> list[RemovableHandle]:
    """Hook every recurrent layer of ``model`` to add the FLOPs of its forwards to ``counts`` under its name, and
    return the hooks."""

    def hook_of(name: str) -> Any:
        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def count(layer: nn.RNNBase, args: tuple[Any, ...]) -> None:
            tokens = args[0].data if isinstance(args[0], PackedSequence) else args[0]
            counts[name] = counts.get(name, 0) + flops.of_recurrent(tokens, layer._flat_weights)

        return count

    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.RNNBase)]
    return [layer.register_forward_pre_hook(hook_of(name)) for name, layer in layers]


def _placed(x: torch.Tensor, fake_mode: torch_internals.FakeTensorMode, device: torch.device) -> torch.Tensor:
    """Return ``x`` as a fake tensor, or one like it on ``device`` where ``x`` is on the meta device."""
    x = x if isinstance(x, torch_internals.FakeTensor) else fake_mode.from_tensor(x)
    if x.device.type != "meta":
        return x
    with fake_mode:
        like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device, requires_grad=x.requires_grad)
    return nn.Parameter(like, x.requires_grad) if isinstance(x, nn.Parameter) else like


def _fill(
    table: Table, lines: Iterable[tuple[str, tuple[Site, ...]]], rows: Callable[[Site], list[tuple[str, ...]]]
) -> None:
    """Add the rows of each line's first site under the line's name; rows equal to those before become "as above"."""
    previous = None
    for name, sites in lines:
        shown = rows(sites[0])
        for index, row in enumerate([("as above",)] if shown == previous else shown):
            table.add_row("" if index else name, *row)
        previous = shown


def _printed(table: Table, *lines: str) -> str:
    text = io.StringIO()
    console = Console(file=text, width=140, no_color=True, highlight=False)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)
    return text.getvalue()


def _blocks(blocks: Mapping[str, BlockPosition]) -> str:
    if set(blocks) == {""}:
        return "blocks: no repeated stack of modules was found, so the whole model is one block"
    stacks = {position.stack: position.total for position in blocks.values()}
    return "blocks: " + ", ".join(f"{stack} ({total})" for stack, total in stacks.items())
