"""Functions and methods of a package that can be deleted, and the lines that this takes."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from composer_mesh.plugins.code_tasks.deletions import Deletion, lines_of
from composer_mesh.plugins.code_tasks.static_rules import parsed

FEWEST_LINES = 3
Definition = ast.FunctionDef | ast.AsyncFunctionDef
How = Literal["function", "static", "class", "method", ""]
NEVER = frozenset({"overload", "abstractmethod", "abstractproperty"})
SELF_CALLED = frozenset({"__init__", "__new__", "__init_subclass__", "__del__", "__set_name__"})
NAMES = re.compile(r"(id|arg|name)='(\w+)'")


@dataclass(frozen=True)
class Function:
    """A function or method. `first` to `last` are the lines of its body, without its docstring.

    `line` is where its code begins, with decorators. `how` says how hidden cases call it.
    """

    path: str
    module: str
    qualname: str
    line: int
    first: int
    last: int
    indent: str
    lines: int
    how: How
    body: str = field(repr=False)
    fingerprint: str = field(repr=False)

    @property
    def target(self) -> str:
        """Its name in a task."""
        return f"{self.module}:{self.qualname}"

    @property
    def owner(self) -> str:
        """The class whose method it is; empty for a function."""
        return self.qualname.rpartition(".")[0]

    def replaced_by(self, statement: str) -> Deletion:
        """Return its deletion, with a statement in place of the body."""
        return Deletion(self.path, self.first, self.last, f"{self.indent}{statement}\n")


@dataclass(frozen=True)
class SourceFile:
    """What is found in a module: functions, and where the constructors of its classes begin."""

    functions: Sequence[Function]
    constructors: Sequence[int]


def functions_in(path: str, module: str, content: bytes, fewest: int = FEWEST_LINES) -> SourceFile:
    """Return the functions of a module that have a body of at least so many lines of code."""
    try:
        text = content.decode("utf-8")
        tree = ast.parse(text)
    except (ValueError, SyntaxError):
        return SourceFile([], [])
    lines = lines_of(text)
    found, makers = [], []
    for node, owner in _definitions(tree):
        if node.name == "__init__" and owner:
            makers.append(_line(node))
        if (one := _function(path, module, node, owner, lines, fewest)) is not None:
            found.append(one)
    return SourceFile(found, makers)


def _definitions(tree: ast.Module) -> Iterator[tuple[Definition, str]]:
    for node in tree.body:
        if isinstance(node, Definition):
            yield node, ""
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, Definition):
                    yield inner, node.name


def _function(
    path: str, module: str, node: Definition, owner: str, lines: list[str], fewest: int
) -> Function | None:
    body = body_of(node)
    if not body or _decorators(node) & NEVER:
        return None
    start, end = _line(body[0]), node.end_lineno or node.lineno
    before = lines[start - 1][: body[0].col_offset]
    if before.strip() or start <= node.lineno:
        return None
    above = node.body[0].end_lineno if len(body) < len(node.body) else node.lineno
    while start - 1 > (above or 0) and _is_remark(lines[start - 2]):
        start -= 1
    taken = [one for one in lines[start - 1 : end] if not _is_remark(one)]
    if len(taken) < fewest or _raises_nothing_else(body):
        return None
    return Function(
        path=path,
        module=module,
        qualname=f"{owner}.{node.name}" if owner else node.name,
        line=_line(node),
        first=start,
        last=_with_remarks(lines, end, node.col_offset),
        indent=re.match(r"\s*", before or "").group() or " " * body[0].col_offset,  # type: ignore[union-attr]
        lines=len(taken),
        how=_how(node, owner),
        body="".join(lines[start - 1 : end]),
        fingerprint=fingerprint(body),
    )


def body_of(node: Definition) -> list[ast.stmt]:
    """Return the statements of a function without its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body


def fingerprint(body: Sequence[ast.stmt]) -> str:
    """Return what a body is, whatever its names are and however it is laid out."""
    names: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        return f"{found[1]}={names.setdefault(found[2], str(len(names)))}"

    return NAMES.sub(numbered, ast.dump(ast.Module(list(body), type_ignores=[])))


class BodyCounts:
    """Counts how often a body stands in a tree: as code of any names, and as text."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._codes: Counter[str] = Counter()
        self._texts = []
        for path, content in sorted(files.items()):
            text = content.decode("utf-8", "replace")
            self._texts.append(_squeezed(text))
            if path.endswith((".py", ".pyi")):
                self._codes.update(_fingerprints(text))

    def has_copy(self, function: Function) -> bool:
        """Whether the body of a function stands anywhere else in the tree."""
        text = _squeezed(function.body)
        return (
            self._codes[function.fingerprint] > 1 or sum(one.count(text) for one in self._texts) > 1
        )


def _fingerprints(text: str) -> Iterator[str]:
    tree = parsed(text)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, Definition):
            yield fingerprint(body_of(node))


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _line(node: ast.stmt) -> int:
    """Return the line where the code of a statement begins, with its decorators."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(one.lineno for one in decorators)])


def _is_remark(line: str) -> bool:
    return not line.strip() or line.lstrip().startswith("#")


def _with_remarks(lines: list[str], end: int, column: int) -> int:
    """Return the last line of a body with the comments that belong to it."""
    last = end
    for number in range(end + 1, len(lines) + 1):
        line = lines[number - 1]
        if line.strip() and not (
            line.lstrip().startswith("#") and len(line) - len(line.lstrip()) > column
        ):
            break
        if line.strip():
            last = number
    return last


def _decorators(node: Definition) -> set[str]:
    return {ast.unparse(one).split("(")[0].rpartition(".")[2] for one in node.decorator_list}


def _raises_nothing_else(body: Sequence[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Raise)


def _how(node: Definition, owner: str) -> How:
    decorators = _decorators(node)
    if isinstance(node, ast.AsyncFunctionDef) or node.name in SELF_CALLED:
        return ""
    if owner and decorators == {"staticmethod"}:
        return "static"
    if owner and decorators == {"classmethod"}:
        return "class"
    if decorators - {"lru_cache", "cache"}:
        return ""
    return "method" if owner else "function"
