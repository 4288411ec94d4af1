"""Types and checks of options that several techniques have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from fp4graph.technique.operands import ADDRESSES, GROUPS, Operand

#: A finite number above 0.
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: A number between 0 and 1, exclusive.
Share = Annotated[float, Field(gt=0, lt=1)]


@dataclass(frozen=True)
class OperandList:
    """Marks an option of a technique as a list of addresses of operands, and checks the list.

    The engine recognises such options by this mark and not by their names: a policy that lists an operand which stays
    in high precision is an error, and parts act on the listed operands by default.

    Attributes:
        among: the operands that the technique can act on.
        scopes: further values of the option, each a word that a policy may write in place of a list, with the operands
            that the word means.
    """

    among: tuple[Operand, ...] = tuple(Operand)
    scopes: tuple[tuple[str, tuple[Operand, ...]], ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._checked, handler(source))

    def _checked(self, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        self.select(value)
        return value

    def select(self, value: str | tuple[str, ...]) -> frozenset[Operand]:
        """Return the operands that a value of the option means; a group stands for its members that are in ``among``.

        Raise ValueError if the list is empty, an address is unknown, or an address means no operand in ``among``.
        """
        if isinstance(value, str):
            return frozenset(dict(self.scopes)[value])
        chosen: set[Operand] = set()
        for name in value:
            meant = set(ADDRESSES.get(name, ())) & set(self.among)
            if not meant:
                problem = "it cannot act on" if name in ADDRESSES else "unknown operand"
                usable = [address for address, operands in ADDRESSES.items() if set(operands) & set(self.among)]
                raise ValueError(f"{problem} {name!r}; choose from {', '.join(usable)}")
            chosen |= meant
        if not chosen:
            raise ValueError("an empty list of operands; leave the option out, or drop the technique")
        return frozenset(chosen)


#: The type of a technique's option that lists operands, by address: ``operands: Operands = Field(("forward",), ...)``.
Operands = Annotated[tuple[str, ...], OperandList()]
#: The types for a technique that acts only on operands of fprop, and only on operands of dgrad and wgrad.
ForwardOperands = Annotated[tuple[str, ...], OperandList(GROUPS["forward"])]
BackwardOperands = Annotated[tuple[str, ...], OperandList(GROUPS["backward"])]


def check_kind(technique: BaseModel, owners: Mapping[str, tuple[str, ...]]) -> None:
    """Raise ValueError if an option is set that ``technique.kind`` does not read.

    ``owners`` maps the name of each option to the kinds that read it.
    """
    kind = getattr(technique, "kind")  # noqa: B009  # a field of the subclass
    for option, kinds in owners.items():
        if kind not in kinds and getattr(technique, option) != type(technique).model_fields[option].default:
            raise ValueError(f"{option} belongs to kind: {' or '.join(kinds)}, and kind is {kind}; leave it out")
