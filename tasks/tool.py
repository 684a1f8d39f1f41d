"""Tools: typed Python functions that an agent calls by name.

    @tool
    async def add(self, item: str, count: int = 1) -> str:
        '''Puts an item in the cart.

        Args:
            item: Name of the item.
            count: How many of it.
        '''

The schema that the agent reads is made from the signature and the docstring, and pydantic checks
the arguments as JSON by the same types. Model-written arguments are data and are never evaluated.

Tools that other programs offer: MCP servers. Reads their descriptions; starts and calls nothing.

The descriptions are those that the config states, so that every process of a run has the same.
"""

from __future__ import annotations

import enum
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar, overload

import docstring_parser
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo

from composer_mesh.configs.environment import McpServer, McpTool
from composer_mesh.configs.validation import fail_fast, first_error
from composer_mesh.tasks.errors import ToolError, UnusableTask

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "__composer_mesh_tool__"
MOST_SHOWN = 40
"""Characters of a model-written name that an error repeats."""
TYPE_ERRORS = ("int_from_float", "none_required", "is_instance_of")
"""Types of pydantic's errors for arguments of a wrong type, besides those that end in `_type`."""
FIELD = "argument_"
"""Before each argument's name in its model: pydantic refuses some names, such as `_x` or `copy`."""
KEYWORDS = {
    "ge": "minimum",
    "gt": "exclusiveMinimum",
    "le": "maximum",
    "lt": "exclusiveMaximum",
    "multiple_of": "multipleOf",
}
"""JSON Schema's keywords for bounds that pydantic writes by names of its own at a union."""
VALUES = frozenset({"const", "default", "enum", "examples"})
"""Keywords that hold values, whose keys are no keywords."""


@dataclass(frozen=True)
class ToolOptions:
    """What a decorated function says of itself in addition to its signature.

    `errors` maps exceptions that the function raises because of a wrong call to error kinds.
    """

    name: str | None = None
    errors: Mapping[type[Exception], str] | None = None


@overload
def tool(function: Function, /) -> Function: ...


@overload
def tool(
    *, name: str | None = None, errors: Mapping[type[Exception], str] | None = None
) -> Callable[[Function], Function]: ...


def tool(function: Any = None, /, *, name: Any = None, errors: Any = None) -> Any:
    """Make a function a tool; it may be a method of a session, plain or async.

    What it returns is shown to the agent: a string as it is, anything else as JSON. It raises
    `ToolError` for a call that the agent got wrong; so do the exceptions named in `errors`, each
    with its error kind. Any other exception is a fault of the task.
    """
    return marked(MARK, ToolOptions(name, errors), function)


def marked(mark: str, options: Any, function: Any = None) -> Any:
    """Return a function with a mark, or a decorator where there is none yet."""
    if function is None:
        return partial(marked, mark, options)
    setattr(function, mark, options)
    return function


class ToolSpec:
    """A tool: its name, description, schema and checked arguments."""

    def __init__(self, function: Callable[..., Any], *, is_method: bool) -> None:
        """Raises `UnusableTask` if a parameter has no type, or none that JSON can carry."""
        options: ToolOptions = getattr(function, MARK, ToolOptions())
        self.function = function
        self.is_method = is_method
        self.name = options.name or function.__name__
        self.errors = dict(options.errors or {})
        documented = docstring_parser.parse(inspect.getdoc(function) or "")
        parts = (documented.short_description, documented.long_description)
        self.description = "\n\n".join(part for part in parts if part)
        notes = {one.arg_name: one.description for one in documented.params if one.description}
        self.arguments = _arguments_model(self.name, function, notes, is_method)
        self._reader = fail_fast(self.arguments)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the format of OpenAI's `tools` parameter."""
        schema = plain_schema(self.arguments.model_json_schema())
        parameters = {
            "type": "object",
            "properties": schema.get("properties", {}),
            "required": schema.get("required", []),
        }
        if "$defs" in schema:
            parameters["$defs"] = schema["$defs"]
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": parameters,
        }
        return {"type": "function", "function": function}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the function takes them; raise ToolError for invalid ones."""
        try:
            found = self._reader.validate_json(json.dumps(arguments))
        except RecursionError:
            facts = {"tool": self.name, "argument": "an argument", "arguments": ""}
            raise ToolError("bad_value", "the arguments are nested too deep", facts) from None
        except ValidationError as error:
            raise self._argument_error(error) from None
        return {name.removeprefix(FIELD): getattr(found, name) for name in type(found).model_fields}

    def _argument_error(self, error: ValidationError) -> ToolError:
        first = first_error(error)
        argument = str(first["loc"][0] if first["loc"] else "")[:MOST_SHOWN]
        names = ", ".join(self.schema["function"]["parameters"]["properties"])
        facts = {"tool": self.name, "argument": argument, "arguments": names}
        if first["type"] == "missing":
            return ToolError("missing_argument", f"{self.name} needs {argument}", facts)
        if first["type"] == "extra_forbidden":
            return ToolError("unknown_argument", f"{self.name} has no {argument}", facts)
        if first["type"].endswith("_type") or first["type"] in TYPE_ERRORS:
            wanted = _wanted(self.schema["function"]["parameters"], argument)
            text = f"{argument} must be {wanted}"
            return ToolError("wrong_type", text, {**facts, "wanted": wanted})
        what = argument or "an argument"
        return ToolError("bad_value", f"{what}: {first['msg'][:80]}", {**facts, "argument": what})


def plain_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a JSON schema without titles, with standard keywords and one type for all numbers."""
    found = {
        KEYWORDS.get(key, key): _plain_part(key, value)
        for key, value in schema.items()
        if key != "title"
    }
    if found.get("anyOf") == [{"type": "integer"}, {"type": "number"}]:
        del found["anyOf"]
        found = {"type": "number", **found}
    return found


def _plain_part(key: str, value: Any) -> Any:
    """Return the value of a schema's keyword with the schemas in it plain."""
    if key in VALUES:
        return value
    if isinstance(value, Mapping):
        if key in ("properties", "$defs"):
            return {name: _plain_part("", one) for name, one in value.items()}
        return plain_schema(value)
    return [_plain_part("", one) for one in value] if isinstance(value, list) else value


def unknown_tool(name: str, tools: Sequence[str]) -> ToolError:
    """Return the error of a call of a tool that does not exist."""
    shown = name[:MOST_SHOWN]
    return ToolError("unknown_tool", f"no tool {shown}", {"tool": shown, "tools": ", ".join(tools)})


def tools_of(session: type, functions: Sequence[Callable[..., Any]] = ()) -> dict[str, ToolSpec]:
    """Return the tools of a session class, in order of definition, then those of `functions`."""
    found: dict[str, ToolSpec] = {}
    methods: dict[str, Any] = {}
    for base in reversed(session.__mro__):
        for attribute, value in vars(base).items():
            if attribute in methods or hasattr(value, MARK):
                methods[attribute] = value
    specs = [ToolSpec(one, is_method=True) for one in methods.values() if hasattr(one, MARK)]
    for spec in (*specs, *(ToolSpec(one, is_method=False) for one in functions)):
        if spec.name in found:
            raise UnusableTask(
                f"two tools are called {spec.name!r}: give one of them another name, such as "
                f'@tool(name="{spec.name}_2")'
            )
        found[spec.name] = spec
    return found


def _arguments_model(
    name: str, function: Callable[..., Any], notes: Mapping[str, str], is_method: bool
) -> type[BaseModel]:
    parameters = list(inspect.signature(function).parameters.values())[1 if is_method else 0 :]
    try:
        types = typing.get_type_hints(function, include_extras=True)
    except NameError as error:
        raise UnusableTask(f"tool {name!r} has a type that cannot be found: {error}") from error
    fields: dict[str, Any] = {}
    for one in parameters:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise UnusableTask(
                f"tool {name!r} takes {one}, but an agent names each argument: write them out"
            )
        if one.name not in types:
            raise UnusableTask(
                f"tool {name!r} has no type for {one.name!r}: annotate it, such as {one.name}: str"
            )
        if _names_enum_members(types[one.name]):
            raise UnusableTask(
                f"tool {name!r} takes {one}, but JSON has no members of an Enum: write the Enum "
                "itself, or a Literal of their values"
            )
        default = ... if one.default is one.empty else one.default
        stated = FieldInfo.from_annotation(types[one.name])
        note = notes.get(one.name) or stated.description
        field = Field(default, alias=stated.alias or one.name, description=note)
        fields[FIELD + one.name] = (types[one.name], field)
    strict = ConfigDict(strict=True, extra="forbid")
    try:
        model: type[BaseModel] = create_model(f"{name}_arguments", __config__=strict, **fields)
        model.model_json_schema()
    except Exception as error:
        raise UnusableTask(
            f"tool {name!r} has an argument that JSON cannot carry: {error}"
        ) from error
    return model


def _names_enum_members(kind: Any) -> bool:
    """Whether a type has a Literal of members of an Enum, which no JSON value is equal to."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal:
        return any(isinstance(one, enum.Enum) for one in parts)
    return any(map(_names_enum_members, parts))


def _wanted(parameters: Mapping[str, Any], argument: str) -> str:
    """Return what an argument must be, in words."""
    kinds = parameters["properties"].get(argument, {})
    branches = [_resolved(one, parameters) for one in kinds.get("anyOf", [kinds])]
    names = list(dict.fromkeys(one.get("type") for one in branches))
    if set(names) == {"number", "integer"}:
        return "a number"
    words = {"string": "a string", "boolean": "true or false", "array": "a list", "null": "null"}
    words |= {"number": "a number", "integer": "a whole number"}
    return " or ".join(words.get(str(one), "an object") for one in names)


def _resolved(schema: Mapping[str, Any], parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema, or the definition that it refers to."""
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    return parameters.get("$defs", {}).get(name, schema)


@dataclass(frozen=True)
class ExternalTool:
    """A tool of a server: the `name` that agents see, and the one that its server knows."""

    name: str
    server: str
    remote: str
    description: str
    parameters: Mapping[str, Any]

    errors: ClassVar[Mapping[type[Exception], str]] = {}
    """As of a `ToolSpec`: its calls raise none that would be mapped."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool in the format of OpenAI's `tools` parameter."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}

    def checked(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as they are: the server checks them."""
        return dict(arguments)

    async def function(self) -> None:
        """Tell that a call has to be awaited; the call itself is made by the session."""


class ToolServers(Protocol):
    """Calls the tools of servers for sessions, which it knows by their keys."""

    async def call(self, key: str, tool: ExternalTool, arguments: Mapping[str, Any]) -> str:
        """Return the text of a result. Raises ToolError or ToolServerLost."""

    def end(self, key: str) -> None:
        """Release what is held for a session."""


def external_tools(servers: Sequence[McpServer]) -> tuple[ExternalTool, ...]:
    """Return the tools that a config states; raises UnusableTask where it states none yet."""
    found = []
    for server in servers:
        if server.tools is None:
            raise UnusableTask(
                f"the tools of the MCP server {server.name!r} are not known: the commands train, "
                "check, play, eval and ablate ask the server for them, and a run's config.toml "
                "states them; name that one"
            )
        found += [_tool(server, one) for one in server.tools]
    return tuple(found)


def with_external(
    task: str, own: Mapping[str, ToolSpec], tools: Sequence[ExternalTool]
) -> dict[str, ToolSpec | ExternalTool]:
    """Return all tools by name; raises UnusableTask where two have the same."""
    found: dict[str, ToolSpec | ExternalTool] = dict(own)
    for one in tools:
        other = found.get(one.name)
        if other is not None:
            owner = (
                f"the MCP server {other.server!r}"
                if isinstance(other, ExternalTool)
                else f"task {task!r}"
            )
            raise UnusableTask(
                f"the MCP server {one.server!r} and {owner} both have a tool {one.name!r}: set "
                f'prefix = "{one.server}_" in its table of [[environment.mcp]], or add '
                f"{one.remote!r} to its deny"
            )
        found[one.name] = one
    return found


def _tool(server: McpServer, tool: McpTool) -> ExternalTool:
    try:
        parameters = json.loads(tool.parameters)
    except ValueError as error:
        raise UnusableTask(
            f"parameters of tool {tool.name!r} of the MCP server {server.name!r} are not JSON "
            f"({error}): remove environment.mcp.*.tools, which the run writes"
        ) from None
    if not isinstance(parameters, dict):
        raise UnusableTask(
            f"parameters of tool {tool.name!r} of the MCP server {server.name!r} are a "
            f"{type(parameters).__name__} but must be an object: remove environment.mcp.*.tools"
        )
    name = f"{server.prefix}{tool.name}"
    schema = plain_schema(parameters)
    return ExternalTool(name, server.name, tool.name, tool.description, schema)
