"""Calls functions on stated inputs inside a box and reports what they return or raise.

The spec is JSON on standard input: `mark`, `imports` (folders), `changed` (files of the agent) and
`calls`, each with `target` ("module:name"), `arguments` and `keywords` as tagged JSON. An argument
may be {"object": ["module:Class", arguments, keywords]}, which the class makes; what iterators give
is {"iterator": items}. No expected value is in the box.
"""

import importlib
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from composer_mesh.plugins.code_tasks.judge.programs.auditing import Audit
from composer_mesh.plugins.code_tasks.judge.programs.reporting import (
    Reporter,
    add_import_folders,
    in_tree,
)
from composer_mesh.plugins.code_tasks.values import decode, encode

MOST_ITEMS = 1000
"""Items that are taken of an iterator, which may have no end."""


def found(target: str) -> Any:
    """Return what "module:name" or "module:Class.name" stands for."""
    module, _, path = target.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def argument_of(found_json: Any) -> Any:
    """Return an argument: a value, or an object that a class of the tree makes of values."""
    if is_object(found_json):
        target, arguments, keywords = found_json["object"]
        named = {name: decode(one) for name, one in keywords.items()}
        return found(target)(*(decode(one) for one in arguments), **named)
    return decode(found_json)


def is_object(argument: Any) -> bool:
    """Whether an argument stands for an object that a class of the tree makes."""
    return isinstance(argument, dict) and set(argument) == {"object"}


def is_iterator(value: Any) -> bool:
    """Whether a value gives its items only once, as a generator does."""
    return isinstance(value, Iterator)


def answer(call: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a call as JSON; what JSON cannot carry is named by its type.

    An iterator that raises while its items are taken counts as a call that raises.
    """
    try:
        arguments = [argument_of(one) for one in call["arguments"]]
        keywords = {name: decode(one) for name, one in call["keywords"].items()}
        returned = found(call["target"])(*arguments, **keywords)
        items = list(itertools.islice(returned, MOST_ITEMS)) if is_iterator(returned) else None
    except BaseException as error:  # noqa: BLE001  what it raises is the answer
        kind = type(error)
        return {"raised": f"{kind.__module__}.{kind.__qualname__}"}
    try:
        report = {
            "returned": encode(returned)
            if items is None
            else {"iterator": [encode(one) for one in items]}
        }
        if not any(is_object(one) for one in call["arguments"]):
            report["arguments"] = [encode(one) for one in arguments]
    except Exception as error:  # noqa: BLE001  its class may be the agent's
        return {"unencodable": f"{type(returned).__name__}: {type(error).__name__}"[:200]}
    return report


def main() -> None:
    spec = json.load(sys.stdin)
    reporter = Reporter(spec["mark"])
    add_import_folders(spec["imports"])
    audit = Audit(in_tree(spec["changed"]))
    audit.install()
    for place, call in enumerate(spec["calls"]):
        reporter.say("value", place=place, **answer(call))
    reporter.end(audit=dict(audit.counts))


if __name__ == "__main__":
    main()
