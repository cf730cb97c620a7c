"""OpenAPI 3.1 documents from pydantic models and a list of operations, for services whose routes are Starlette's.

Descriptions of operations stand beside their handlers; this module only turns them into a document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

Schema = type[BaseModel] | Mapping[str, Any]
"""A model, or a JSON Schema 2020-12 written out. Inside one, `ref(Model)` points at a model's component."""

_REF = "#/components/schemas/{model}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """A header, query or path parameter."""

    name: str
    where: Literal["header", "query", "path"]
    description: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})
    required: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """One response: what it means, and its bodies by media type (empty: it has none)."""

    description: str
    content: Mapping[str, Schema] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    """Header name to description."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path (`{name}` for path parameters)."""

    method: Literal["get", "post", "put", "delete", "head", "options"]
    path: str
    id: str
    summary: str
    answers: Mapping[int, Answer]
    description: str = ""
    tag: str = ""
    parameters: Sequence[Parameter] = ()
    request: Mapping[str, Schema] = field(default_factory=dict)
    """Request bodies by media type."""
    security: Sequence[str] = ()
    """Names of security schemes, any one of which is enough."""


def ref(model: type[BaseModel]) -> dict[str, str]:
    """A reference to a model's component; the model must be used by some operation or be named in `models`."""
    return {"$ref": _REF.format(model=model.__name__)}


def document(
    title: str,
    version: str,
    operations: Sequence[Operation],
    *,
    description: str = "",
    models: Sequence[type[BaseModel]] = (),
    servers: Sequence[str] = (),
    security_schemes: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a service (OpenAPI Specification 3.1.1, section 4.8).

    Args:
        title: Name of the service.
        version: Version of the product.
        operations: What it answers to.
        description: Markdown.
        models: Further models that written-out schemas refer to.
        servers: Public URLs.
        security_schemes: As the specification has them, by name.

    Returns:
        The document as plain JSON values.
    """
    used: dict[type[BaseModel], None] = dict.fromkeys(models)
    for operation in operations:
        for schema in (
            *operation.request.values(),
            *(s for a in operation.answers.values() for s in a.content.values()),
        ):
            if isinstance(schema, type):
                used[schema] = None
    _, definitions = models_json_schema([(model, "validation") for model in used], ref_template=_REF)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    result: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": title,
            "version": version,
            "description": description,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": url} for url in servers],
        "paths": paths,
        "components": {"schemas": definitions.get("$defs", {}), "securitySchemes": dict(security_schemes or {})},
    }
    if not servers:
        del result["servers"]
    return result


def _operation(operation: Operation) -> dict[str, Any]:
    result: dict[str, Any] = {
        "operationId": operation.id,
        "summary": operation.summary,
        "responses": {str(status): _answer(answer) for status, answer in operation.answers.items()},
    }
    if operation.description:
        result["description"] = operation.description
    if operation.tag:
        result["tags"] = [operation.tag]
    if operation.parameters:
        result["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.where,
                "description": parameter.description,
                "required": parameter.required or parameter.where == "path",
                "schema": dict(parameter.schema),
            }
            for parameter in operation.parameters
        ]
    if operation.request:
        result["requestBody"] = {"required": True, "content": _content(operation.request)}
    if operation.security:
        result["security"] = [{name: []} for name in operation.security]
    return result


def _answer(answer: Answer) -> dict[str, Any]:
    result: dict[str, Any] = {"description": answer.description}
    if answer.content:
        result["content"] = _content(answer.content)
    if answer.headers:
        result["headers"] = {
            name: {"description": description, "schema": {"type": "string"}}
            for name, description in answer.headers.items()
        }
    return result


def _content(content: Mapping[str, Schema]) -> dict[str, Any]:
    return {
        media_type: {"schema": ref(schema) if isinstance(schema, type) else dict(schema)}
        for media_type, schema in content.items()
    }
