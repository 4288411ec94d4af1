"""The JSON schema of policy files, by which editors complete and check them while they are written.

It describes keys, types and installed names. Whatever depends on other keys or on the model is checked when the policy
is loaded or applied.
"""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema

from fp4graph.policy.match import Range
from fp4graph.policy.schema import PolicySection, QuantizeSection, ScaleSection, TechniqueEntry
from fp4graph.policy.section import Section, listed
from fp4graph.technique.operands import ADDRESSES
from fp4graph.technique.registry import Registry

DIALECT = "http://json-schema.org/draft-07/schema#"


def json_schema(registry: Registry) -> dict[str, Any]:
    """Return the schema of a policy file that may name the formats, policies and techniques of ``registry``."""
    techniques = dict(sorted(registry.techniques.items()))
    quantizers = QuantizeSection, *QuantizeSection.__subclasses__()
    models: Any = (PolicySection, TechniqueEntry, ScaleSection, *quantizers, *techniques.values())
    references, schema = models_json_schema(
        [(model, "validation") for model in models], schema_generator=_Generator, ref_template="#/definitions/{model}"
    )
    definitions: dict[str, Any] = schema["$defs"]
    named = {model: references[model, "validation"] for model in models}
    of_model = {model: definitions[reference["$ref"].rpartition("/")[2]] for model, reference in named.items()}
    of_model[TechniqueEntry].clear()
    # `name:` without options is null. A technique with a required option is not written by its name alone.
    bare = [name for name, cls in techniques.items() if not any(f.is_required() for f in cls.model_fields.values())]
    of_model[TechniqueEntry]["anyOf"] = [{"enum": bare}] + [
        {"type": "object", "properties": {name: {"anyOf": [named[cls], *([{"type": "null"}] if name in bare else [])]}},
         "required": [name], "additionalProperties": False}
        for name, cls in techniques.items()
    ]  # fmt: skip
    of_model[ScaleSection]["properties"]["format"]["enum"] = sorted(registry.scales)
    elements = {"enum": sorted(registry.elements)}
    for section in quantizers:
        written = of_model[section]["properties"]["element"]
        written["anyOf"] = [elements, {"type": "array", "items": elements, "minItems": 1}]
    for definition in definitions.values():
        operands = definition.get("properties", {}).get("operands", {})
        if "additionalProperties" in operands:
            operands["propertyNames"] = {"enum": list(ADDRESSES)}
    return {"$schema": DIALECT, **named[PolicySection], "definitions": definitions}


class _Generator(GenerateJsonSchema):
    """Writes what a policy file may hold, where pydantic's schema describes the validated object."""

    _in_section = False

    def field_title_should_be_set(self, schema: Any) -> bool:
        """Leave titles out: they repeat the keys."""
        return False

    def nullable_schema(self, schema: Any) -> JsonSchemaValue:
        """Leave null out of sections, where a key that is written has a value; a technique's option may be null."""
        return self.generate_inner(schema["schema"]) if self._in_section else super().nullable_schema(schema)

    def default_schema(self, schema: Any) -> JsonSchemaValue:
        """Leave out all defaults but those of switches: any other key inherits its default, or it is empty."""
        written = super().default_schema(schema)
        if not isinstance(written.get("default"), bool):
            written.pop("default", None)
        return written

    def function_before_schema(self, schema: Any) -> JsonSchemaValue:
        """Allow one item in place of a list of one, where the validator does."""
        inner = super().function_before_schema(schema)
        if schema["function"]["function"] is listed:
            return {"anyOf": [inner["items"], inner]}
        return inner

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        """Let a range also be a whole number, or have ``exactly``."""
        outer, self._in_section = self._in_section, issubclass(schema["cls"], Section)
        written = super().model_schema(schema)
        self._in_section = outer
        if schema["cls"] is Range:
            whole = {"type": "integer", "minimum": 0}
            written["properties"]["exactly"] = whole | {"description": "The only number."}
            return {"anyOf": [whole, written]}
        return written
