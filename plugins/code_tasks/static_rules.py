"""Rules over the syntax tree of a module, each with the kind of its findings."""

from __future__ import annotations

import ast
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence

IMPORTS = {
    "ctypes": "native_code",
    "cffi": "native_code",
    "_ctypes": "native_code",
    "mmap": "native_code",
    "gc": "object_inspection",
    "inspect": "frame_inspection",
    "subprocess": "process",
    "multiprocessing": "process",
    "pty": "process",
    "signal": "process",
    "socket": "network",
    "ssl": "network",
    "urllib.request": "network",
    "http": "network",
    "http.client": "network",
    "requests": "network",
    "pytest": "test_framework",
    "_pytest": "test_framework",
    "pluggy": "test_framework",
    "unittest": "test_framework",
    "atexit": "exit_hook",
    "marshal": "code_loading",
    "zipimport": "code_loading",
    "zipfile": "code_loading",
    "ensurepip": "code_loading",
    "pip": "code_loading",
    "importlib.metadata": "code_loading",
    "pickle": "pickling",
}
"""Modules by the kind that importing them is."""

CALLS = {
    "os._exit": "exit",
    "sys.exit": "exit",
    "exit": "exit",
    "quit": "exit",
    "os.abort": "exit",
    "os.kill": "process",
    "os.fork": "process",
    "os.forkpty": "process",
    "os.system": "process",
    "os.popen": "process",
    "os.posix_spawn": "process",
    "os.write": "descriptor",
    "os.dup": "descriptor",
    "os.dup2": "descriptor",
    "os.fdopen": "descriptor",
    "os.readlink": "descriptor",
    "sys._getframe": "frame_inspection",
    "sys._current_frames": "frame_inspection",
    "sys.settrace": "frame_inspection",
    "sys.setprofile": "frame_inspection",
    "globals": "frame_inspection",
    "signal.signal": "process",
    "signal.alarm": "process",
    "atexit.register": "exit_hook",
    "eval": "code_loading",
    "exec": "code_loading",
    "compile": "code_loading",
    "__import__": "code_loading",
    "os.execv": "process",
    "os.execve": "process",
}
"""Calls by their dotted names."""

FRAME_ATTRIBUTES = frozenset({"f_back", "f_locals", "f_globals", "tb_frame", "gi_frame", "f_code"})
ESCAPES = frozenset({"__subclasses__", "__globals__", "__builtins__", "__code__", "__closure__"})
PATCHED = frozenset(
    {
        *("builtins", "json", "pickle", "pytest", "_pytest", "os", "sys", "time", "unittest"),
        *("pluggy", "__builtins__", "importlib", "inspect", "gc", "marshal", "TestReport"),
    }
)
SECRETS = (
    *("/proc/", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".git/", ".pyc"),
    *("site-packages", "ensurepip", "_vendor", ".orig", ".rej", "typeshed", "/.cache", "/etc/"),
    *("junit", "PYTEST_", "conftest.py", "/dev/shm", "dist-packages", "egg-info"),
)
"""Parts of strings by which code reads what is no part of its feature."""

ALWAYS = ("__eq__", "__ne__", "__bool__", "__lt__", "__le__", "__gt__", "__ge__", "__contains__")


LARGEST = 1_000_000
"""Bytes of a module from which on it is not parsed."""


def parsed(content: bytes) -> ast.Module | None:
    """Return the syntax tree of a module; None where there is none, or where it is too large."""
    if len(content) > LARGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def findings_of(module: ast.Module) -> Counter[str]:
    """Return the findings of a module by kind."""
    found: Counter[str] = Counter()
    names = _imported_names(module)
    for node in ast.walk(module):
        found.update(_of_node(node, names))
    return found


def _of_node(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from _of_import(node)
    elif isinstance(node, ast.Call):
        yield from _of_call(node, names)
    elif isinstance(node, ast.Attribute):
        yield from _of_attribute(node)
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete):
        yield from _of_assignment(node, names)
    elif isinstance(node, ast.ClassDef):
        yield from _of_class(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _of_text(node.value)


def _of_import(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    modules = [one.name for one in node.names]
    if isinstance(node, ast.ImportFrom):
        modules = [node.module or ""] if not node.level else []
    for module in modules:
        for name in (module, module.split(".")[0]):
            if name in IMPORTS:
                yield IMPORTS[name]
                break


def _of_call(node: ast.Call, names: dict[str, str]) -> Iterator[str]:
    name = _dotted(node.func, names)
    if name in CALLS:
        yield CALLS[name]
    elif name.startswith(("gc.get_", "ctypes.")):
        yield "object_inspection"
    elif name in {"setattr", "delattr"} and node.args:
        if _dotted(node.args[0], names).split(".")[0] in PATCHED or len(node.args) < 2:
            yield "patching"
    elif name in {"importlib.import_module", "__import__"}:
        yield "code_loading"
    elif name in {"pytest.skip", "pytest.xfail", "pytest.exit"}:
        yield "test_framework"


def _of_attribute(node: ast.Attribute) -> Iterator[str]:
    if node.attr in FRAME_ATTRIBUTES:
        yield "frame_inspection"
    elif node.attr in ESCAPES:
        yield "object_inspection"
    elif node.attr == "modules" and isinstance(node.value, ast.Name) and node.value.id == "sys":
        yield "patching"


def _of_assignment(
    node: ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete, names: dict[str, str]
) -> Iterator[str]:
    targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [node.target]
    for target in targets:
        while isinstance(target, ast.Subscript):
            target = target.value
        if isinstance(target, ast.Attribute):
            root = _dotted(target, names).split(".")[0]
            if root in PATCHED:
                yield "patching"


def _of_class(node: ast.ClassDef) -> Iterator[str]:
    for one in node.body:
        if isinstance(one, ast.FunctionDef):
            if one.name in ALWAYS and _always_the_same(one.body):
                yield "always_equal"
            elif one.name in {"__reduce__", "__reduce_ex__"}:
                yield "pickling"
            elif one.name in {"__class__", "__instancecheck__", "__subclasshook__"}:
                yield "false_class"


def _of_text(text: str) -> Iterator[str]:
    if len(text) < 400 and "\n" not in text and any(one in text for one in SECRETS):
        yield "reads_outside"


def _always_the_same(body: Sequence[ast.stmt]) -> bool:
    """Whether a comparison returns a constant that is no `NotImplemented`."""
    code = [one for one in body if not (isinstance(one, ast.Expr) and _is_text(one.value))]
    last = code[-1] if code else None
    return (
        len(code) == 1
        and isinstance(last, ast.Return)
        and isinstance(last.value, ast.Constant)
        and last.value.value is not None
    )


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _imported_names(module: ast.Module) -> dict[str, str]:
    """Return what names of the module stand for, by its imports."""
    names: dict[str, str] = {}
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            names |= {
                one.asname or one.name.split(".")[0]: one.name for one in node.names if one.asname
            }
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    return names


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([names.get(node.id, node.id), *reversed(parts)])
