"""The base of every section of a policy file, and the types that sections share."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    StrictInt,
    ValidationError,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from fp4graph.errors import suggest

_Item = TypeVar("_Item")
#: The most wrong keys that get an error message: suggestions for thousands of keys would take minutes.
_REPORTED = 20


class Section(BaseModel, frozen=True, extra="forbid"):
    """A frozen mapping with fixed keys; a key that is written must have a value."""

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        return only_known(data, cls.written_keys(), "key")

    @classmethod
    def written_keys(cls) -> list[str]:
        """Return the keys that a policy may write."""
        return list(cls.model_fields)


def only_known(data: Any, keys: Collection[str], kind: str) -> Any:
    """Return ``data`` if each of its keys is one of ``keys`` and has a value; raise ValidationError otherwise."""
    wrong_items = [
        (key, value)
        for key, value in (data.items() if isinstance(data, dict) else ())
        if key not in keys or value is None
    ]
    errors = [
        InitErrorDetails(type=_EMPTY if key in keys else _unknown(kind, key, keys), loc=(key,), input=value)
        for key, value in wrong_items[:_REPORTED]
    ]
    if errors:
        raise ValidationError.from_exception_data("policy", errors)
    return data


_EMPTY = PydanticCustomError("must_be", "must have a value, or be left out")


def _unknown(kind: str, key: str, keys: Collection[str]) -> PydanticCustomError:
    context = {"kind": kind, "key": repr(key), "hint": suggest(key, keys)}
    return PydanticCustomError("unknown", "unknown {kind} {key}; {hint}", context)


def wrong(what: str) -> PydanticCustomError:
    """Return the error that a value must be ``what``."""
    return PydanticCustomError("must_be", "must be {what}", {"what": what})


def must_be(what: str) -> WrapValidator:
    """Return a validator whose only error is that a value must be ``what``, whatever the members of a union report."""

    def validate(value: Any, handler: Callable[[Any], Any]) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise wrong(what) from None

    return WrapValidator(validate)


def listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Text = Annotated[str, Field(strict=True, min_length=1)]
#: The name of a policy or rule, which reports show and file names may contain.
Name = Annotated[str, Field(strict=True, min_length=1, max_length=200)]
Count = Annotated[StrictInt, Field(ge=1)]
#: The JSON schema of a whole number from 1, or a share between 0 and 1.
COUNT_OR_SHARE = WithJsonSchema({
    "anyOf": [{"type": "integer", "minimum": 1}, {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}]
})  # fmt: skip
Size = Annotated[StrictInt, Field(ge=0)]
#: One item, or several as a list.
OneOrMore = Annotated[tuple[_Item, ...], BeforeValidator(listed)]
Texts = Annotated[OneOrMore[Text], Field(min_length=1), must_be("text, or a list of at least one text")]
#: The root module is called "", hence an empty text is a glob.
Globs = Annotated[
    OneOrMore[Annotated[str, Field(strict=True)]], Field(min_length=1), must_be("text, or a list of at least one text")
]
