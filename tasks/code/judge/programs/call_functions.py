"""Calls functions on stated inputs inside a box and reports what they return or raise.

The spec is JSON on standard input: `mark`, `imports` (folders), `changed` (files of the agent) and
`calls`, each with `target` ("module:name"), `arguments` and `keywords` as tagged JSON. No expected
value is in the box.
"""

import importlib
import json
import sys
from typing import Any

from composer_mesh.tasks.code.judge.programs.auditing import Audit
from composer_mesh.tasks.code.judge.programs.reporting import Reporter, add_import_folders, in_tree
from composer_mesh.tasks.code.values import decode, encode


def found(target: str) -> Any:
    """Return what "module:name" or "module:Class.name" stands for."""
    module, _, path = target.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def answer(call: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of a call as JSON; what JSON cannot carry is named by its type."""
    arguments = [decode(one) for one in call["arguments"]]
    keywords = {name: decode(one) for name, one in call["keywords"].items()}
    try:
        returned = found(call["target"])(*arguments, **keywords)
    except BaseException as error:  # noqa: BLE001  what it raises is the answer
        kind = type(error)
        return {"raised": f"{kind.__module__}.{kind.__qualname__}"}
    try:
        return {"returned": encode(returned), "arguments": [encode(one) for one in arguments]}
    except Exception as error:  # noqa: BLE001  its class may be the agent's
        return {"unencodable": f"{type(returned).__name__}: {type(error).__name__}"[:200]}


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
