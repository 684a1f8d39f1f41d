"""Reads the part of a Dockerfile that is built without a daemon; all else is refused by name.

FROM (one), RUN, COPY, WORKDIR, ENV, USER, ARG, CMD and ENTRYPOINT, as Docker means them. LABEL and
EXPOSE are read and have no effect. Only services run what CMD and ENTRYPOINT state.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from composer_mesh.plugins.harbor.containers.port import ContainerError

NO_EFFECT = ("LABEL", "EXPOSE")
KNOWN = (
    *("FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "ARG", "CMD", "ENTRYPOINT"),
    *NO_EFFECT,
)
VARIABLE = re.compile(r"\\(.)|\$(?:(\w+)|\{(\w+)(?:(:[-+])([^}]*))?\})", re.DOTALL)
OPTIONS = re.compile(r"^--|<<-?['\"]?\w")
DIRECTIVE = re.compile(r"#\s*(escape)\s*=", re.IGNORECASE)
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Instruction:
    """An instruction, the text after its name, and its line."""

    name: str
    text: str
    line: int

    def error(self, why: str) -> ContainerError:
        """Return the error for it."""
        return ContainerError("build", f"Dockerfile, line {self.line}: {self.name}: {why}")

    def words(self) -> list[str]:
        """Return what follows, as a JSON list or as words of a shell."""
        if (found := exec_form(self.text)) is not None:
            return found
        try:
            return shlex.split(self.text)
        except ValueError as error:
            raise self.error(str(error)) from None


def instructions(folder: Path, name: str = "Dockerfile") -> Iterator[Instruction]:
    """Yield the instructions of a Dockerfile in a folder; raises ContainerError."""
    file = folder / name
    try:
        text = file.read_bytes()[: MOST_BYTES + 1].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ContainerError("build", f"{file}: {error}") from None
    if len(text) > MOST_BYTES:
        raise ContainerError("build", f"{file} has more than {MOST_BYTES:,} bytes")
    if (folder / ".dockerignore").exists():
        raise ContainerError("build", f"{folder / '.dockerignore'}: {WITHOUT}")
    yield from _split(text)


WITHOUT = "not supported without a daemon: use podman or docker, or a prebuilt image"


def _split(text: str) -> Iterator[Instruction]:
    pending, began = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if DIRECTIVE.match(bare):
            raise ContainerError("build", f"Dockerfile, line {number}: {bare}: {WITHOUT}")
        if bare.startswith("#") or (not bare and not pending):
            continue
        began = began or number
        if bare.endswith("\\"):
            pending += line.rstrip()[:-1]
            continue
        yield _instruction(pending + line, began)
        pending, began = "", 0
    if pending.strip():
        yield _instruction(pending, began)


def _instruction(text: str, line: int) -> Instruction:
    name, _, rest = text.strip().partition(" ")
    found = Instruction(name.upper(), rest.strip(), line)
    if found.name not in KNOWN:
        raise found.error(WITHOUT)
    if not found.text:
        raise found.error("nothing follows it")
    if found.name in ("RUN", "COPY") and OPTIONS.search(found.text):
        raise found.error(f"options and here-documents are {WITHOUT}")
    return found


def started_words(text: str) -> list[str]:
    """Return the words of what CMD or ENTRYPOINT starts: a JSON list, or a line of the shell.

    >>> started_words('["a", "b"]'), started_words("a b"), started_words("[]")
    (['a', 'b'], ['/bin/sh', '-c', 'a b'], [])
    """
    if text.replace(" ", "") == "[]":
        return []
    return exec_form(text) or ["/bin/sh", "-c", text]


def exec_form(text: str) -> list[str] | None:
    """Return the words of a JSON list, or None for another text."""
    if not text.startswith("["):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if found and all(isinstance(one, str) for one in found) else None


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with `$NAME`, `${NAME}`, `${NAME:-else}` and `${NAME:+then}` replaced.

    >>> substituted("${A:-b}/$C", {"C": "d"})
    'b/d'
    """

    def value(found: re.Match[str]) -> str:
        escaped, plain, braced, sign, other = found.groups()
        if escaped is not None:
            return escaped if escaped == "$" else found[0]
        own = variables.get(plain or braced, "")
        if sign == ":-":
            return own or other
        return other if sign == ":+" and own else "" if sign == ":+" else own

    return VARIABLE.sub(value, text)


def assignments(found: Instruction, variables: Mapping[str, str]) -> dict[str, str]:
    """Return what ENV sets: `NAME=VALUE ...` or the older `NAME VALUE`."""
    first, _, rest = found.text.partition(" ")
    if "=" not in first:
        if not rest.strip():
            raise found.error("write NAME=VALUE")
        return {first: substituted(rest.strip(), variables)}
    pairs = [one.partition("=") for one in found.words()]
    if not all(sign and name for name, sign, _ in pairs):
        raise found.error("write NAME=VALUE")
    return {name: substituted(value, variables) for name, _, value in pairs}


def sources(found: Instruction, folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files and folders of the context that COPY names; raises ContainerError."""
    result: list[Path] = []
    for pattern in patterns:
        plain = pattern.strip("/")
        if ".." in plain.split("/"):
            raise found.error(f"{pattern!r} leads out of the folder")
        matches = [folder] if plain in ("", ".") else sorted(folder.glob(plain.removeprefix("./")))
        if not matches:
            raise found.error(f"{pattern!r} matches nothing in {folder}")
        result += matches
    return result


def context_files(found: Instruction, source: Path) -> dict[str, Path]:
    """Return the regular files below a source by relative path, or the file itself by its name."""
    if source.is_symlink():
        raise found.error(f"{source} is a link, and links are {WITHOUT}")
    if source.is_file():
        return {source.name: source}
    files = {}
    for one in sorted(source.rglob("*")):
        if one.is_symlink():
            raise found.error(f"{one} is a link, and links are {WITHOUT}")
        if one.is_file():
            files[one.relative_to(source).as_posix()] = one
    return files
