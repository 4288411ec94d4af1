"""The graph pass: finds the matrix work of a captured graph, asks the policy about it, and replaces what is quantized.

Three passes over named data: :mod:`~fp4graph.graph.find` describes the work, :mod:`~fp4graph.graph.plan` decides about
it, :mod:`~fp4graph.graph.replace` changes the graph.

Precondition: a graph as Dynamo hands it to a backend (torch-level nodes with ``example_value`` and
``nn_module_stack``). Postcondition: no marker is left; every site that a rule quantizes is one call of a function
around :func:`fp4graph.ops.matmul.quantized_matmul`; everything else is unchanged, except that opaque nodes with matrix
products inside (:mod:`~fp4graph.graph.expand`) are written out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from fp4graph.errors import CaptureError, PolicyError
from fp4graph.graph.find import find
from fp4graph.graph.names import Names, Owner
from fp4graph.graph.plan import Planner
from fp4graph.graph.regions import separate_writes
from fp4graph.graph.replace import UnmarkedWeight, replace
from fp4graph.graph.site import Site, WeightUse
from fp4graph.policy import Policy


@dataclass(frozen=True)
class Rewritten:
    """The report on a rewritten graph. Fields that are not listed here are explained in ``Found`` and ``Planner``.

    Attributes:
        keys: positions of the graph's inputs that are noise keys, with the modules that they belong to.
        steps: positions of the inputs that are the step of the forward.
        draws: whether a site of the graph draws noise.
    """

    sites: list[Site]
    uses: list[WeightUse]
    read: set[Owner]
    marked: set[str | None]
    refused: CaptureError | None
    keys: dict[int, str]
    steps: set[int]
    draws: bool


def rewrite(
    gm: GraphModule,
    policy: Policy,
    names: Names,
    *,
    first_occurrence: Mapping[str, int] | None = None,
    keys: Mapping[int, str] | None = None,
    stateless: bool = False,
) -> Rewritten:
    """Rewrite ``gm`` and the bodies inside it, in place.

    Args:
        names: the names of the model's modules and parameters.
        first_occurrence: number of sites of each module that earlier graphs of the model held.
        keys: fully qualified name of the module that a marker's key belongs to, by the key's id.
        stateless: whether the graph has no markers (the ``torch.compile`` entry point).

    Raises:
        CaptureError: a site cannot be quantized as the policy says.
        PolicyError: the policy draws noise or keeps state, and the graph is ``stateless``.
    """
    found = find(gm, names, policy.may_quantize, keys)
    planner, unmarked, draws = Planner(policy, first_occurrence), list[UnmarkedWeight](), False
    written = set[Node]()
    planned = planner.plan(found.work)
    quantized = {site.found.product.node for site in planned}
    for replacement in found.replacements:
        replacement.settle(quantized)
    for site in planned:
        program = site.plan.program
        draws |= program is not None and program.draws
        if stateless and program is not None and (program.draws or program.state):
            raise PolicyError(
                f"policy {policy.name!r} draws noise or keeps state at {site.found.view}, which torch.compile's "
                "backend='fp4graph' cannot carry; use fp4graph.apply(model, policy)",
                file=policy.file,
            )
        try:
            written |= replace(site)
        except UnmarkedWeight as error:
            unmarked.append(error)
    if unmarked:
        unmarked[0].all = unmarked
        raise unmarked[0]
    separate_writes(found.bodies, written)
    for body in found.bodies:
        body.recompile()
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    keyed = {place: found.keys[node] for place, node in enumerate(inputs) if node in found.keys}
    steps = {place for place, node in enumerate(inputs) if node in found.steps}
    return Rewritten(planner.sites, planner.uses, found.read, found.marked, planner.refused, keyed, steps, draws)
