"""The report of what a policy would quantize in a model, as tables, an HTML page or plain data."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from fp4graph.graph import targets
from fp4graph.graph.site import Site
from fp4graph.model import census
from fp4graph.model.html import html, page
from fp4graph.numerics.words import describe
from fp4graph.policy import Policy
from fp4graph.policy.words import summarize
from fp4graph.technique.site import BlockPosition


@dataclass(frozen=True)
class Explanation:
    """The sites of a model under a policy; ``str()``, and the last line of a notebook's cell, show a table.

    Attributes:
        policy: the resolved policy.
        sites: every matrix product, attention and recurrent layer of the model, in graph order.
        blocks: the position of each module in a repeated stack.
        problem: the error that training under this policy would raise, or a message that torch counts FLOPs of no
            listed site; None without a problem.
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
        """The FLOPs of one forward, summed over the sites whose FLOPs are known."""
        return sum(site.flops or 0 for site in self.sites)

    @property
    def totals(self) -> dict[str, dict[str, int]]:
        """The quantized, kept and unsupported FLOPs of one forward, each summed by rule or kind of operation."""
        return census.totals(self.sites)

    def share(self, site: Site) -> float | None:
        """Return the share of the FLOPs of one forward at ``site``; None where they are unknown."""
        return None if site.flops is None or not self.flops else site.flops / self.flops

    def __str__(self) -> str:
        return self.table()

    def _repr_html_(self) -> str:
        return html(self._table(every=False), *self._summary)

    def to_html(self, *, target: str | None = None) -> str:
        """Return an HTML page with the summary and the table of sites. Sections that open by a click list each site by
        itself, the code that quantizes, and with ``target`` the GEMMs that run natively on that target. The page needs
        no other file and no network."""
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
        nothing = [] if self.quantized else ["nothing is quantized; the table of sites says why"]
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
        """Return a table that says which GEMMs run natively on a target, such as "b200" or "te", and why the others
        would not. Equal sites of repeated blocks share a line, unless ``every`` is set.

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
        """Return each line's name and sites."""
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
        """Return the explanation as plain data. ``schedule`` adds the code that quantizes each operand; ``target`` adds
        whether each GEMM runs natively on that target."""
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


def _fill(
    table: Table, lines: Iterable[tuple[str, tuple[Site, ...]]], rows: Callable[[Site], list[tuple[str, ...]]]
) -> None:
    """Add the rows of each line's first site under the line's name, or "as above" if the line before has equal rows."""
    previous = None
    for name, sites in lines:
        shown = rows(sites[0])
        for index, row in enumerate([("as above",)] if shown == previous else shown):
            table.add_row("" if index else name, *row)
        previous = shown


def _printed(table: Table, *lines: str) -> str:
    text = io.StringIO()
    console = Console(file=text, width=140, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(table)
    for line in lines:
        console.print(line, soft_wrap=True)
    return text.getvalue()


def _blocks(blocks: Mapping[str, BlockPosition]) -> str:
    if set(blocks) == {""}:
        return "blocks: no repeated stack of modules was found, so the whole model is one block"
    stacks = {position.stack: position.total for position in blocks.values()}
    return "blocks: " + ", ".join(f"{stack} ({total})" for stack, total in stacks.items())
