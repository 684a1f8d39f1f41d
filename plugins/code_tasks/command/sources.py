"""Source distributions: from the index, a file or a folder, read and never run.

Nothing of a distribution is executed and nothing is unpacked on disk: an archive is read member by
member, regular files with plain names only.

Files of problems in the format of HumanEval are read as a package with a module and a test for each
problem. Each line is a JSON object: `prompt` (a module up to the docstring of its last function),
`canonical_solution` (the body), `entry_point` (the function) and `test`, which defines
`check(candidate)`.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Any, Self

from composer_mesh.plugins.code_tasks.making.functions import FEWEST_LINES
from composer_mesh.plugins.code_tasks.making.package import PackageRefused

BUILT_IN = (
    "addict==2.4.0",
    "boltons==26.2.0",
    "cachetools==8.0.1",
    "deepmerge==4.0.0",
    "docstring-parser==0.18.0",
    "funcy==2.1",
    "humanize==4.17.0",
    "inflection==0.5.1",
    "isodate==0.7.2",
    "itsdangerous==2.2.0",
    "Mako==1.4.3",
    "mistune==3.4.0",
    "more-itertools==11.2.1",
    "parse==1.22.4",
    "python-slugify==9.2.0",
    "rfc3986==2.0.0",
    "schedule==1.2.2",
    "semver==3.1.1",
    "sqlparse==0.6.1",
    "tabulate==0.10.0",
    "texttable==1.7.2",
    "titlecase==2.4.1",
    "tomlkit==0.15.2",
    "toolz==1.2.0",
    "uritemplate==4.2.0",
    "validators==0.36.0",
    "webcolors==25.10.0",
    "markdown-it-py==4.3.0",
    "pydash==8.1.0",
    "num2words==0.5.14",
    "jsonpatch==1.47",
    "furl==2.1.4",
    "arrow==1.4.0",
    "croniter==7.0.0",
)

PROBLEM_FILES = (".jsonl", ".jsonl.gz")
LARGEST = 64_000_000
TEXTS = ("prompt", "canonical_solution", "entry_point", "test")


def package_of_problems(name: str, content: bytes) -> dict[str, bytes]:
    """Return the files of a package; raises ValueError where a line is no problem."""
    module = re.sub(r"\W", "_", name).lower()
    about = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\nLicense: that of the file\n"
    files = {"PKG-INFO": about.encode(), f"{module}/__init__.py": b""}
    for place, row in enumerate(_rows(content)):
        problem = f"problem_{place:03d}"
        source = f"{row['prompt'].rstrip()}\n{row['canonical_solution'].rstrip()}\n"
        _parsed(source, place)
        test = (
            f"from {module}.{problem} import *\n\n{row['test'].strip()}\n\n\n"
            f"def test_{problem}():\n    check({row['entry_point']})\n"
        )
        _parsed(test, place)
        files[f"{module}/{problem}.py"] = source.encode()
        files[f"tests/test_{problem}.py"] = test.encode()
    return files


def _rows(content: bytes) -> list[dict[str, Any]]:
    if content[:2] == b"\x1f\x8b":
        with gzip.open(io.BytesIO(content)) as packed:
            content = packed.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST:,} bytes: split it")
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON in UTF-8 ({error}): correct it") from None
        if not isinstance(row, dict) or not all(isinstance(row.get(one), str) for one in TEXTS):
            raise ValueError(
                f"line {number} is not a problem: it needs the texts {', '.join(TEXTS)}"
            )
        if not row["entry_point"].isidentifier():
            raise ValueError(f"line {number} has an entry_point that is not a name of a function")
        rows.append(row)
    if not rows:
        raise ValueError("it has no problem")
    return rows


def _parsed(text: str, place: int) -> None:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"problem {place} is not Python ({error})") from None


LARGEST_ARCHIVE = 64_000_000
LARGEST_UNPACKED = 256_000_000
MOST_FILES = 20_000
LONGEST_HEADER = 1 << 20
DESCRIBING = (
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
)
"""Types of headers that describe the next file: `tarfile` reads each at once."""
INDEX = "https://pypi.org/simple"
ARCHIVE = re.compile(r"(.+)-([^-]+)\.(tar\.gz|tar\.bz2|tar\.xz|tgz|zip)")


class SourceUnavailable(Exception):
    """A source distribution cannot be fetched or read; the message says why."""


@dataclass(frozen=True)
class SourceDistribution:
    """The files of a source distribution by path, and the checksum of its archive.

    Functions with fewer lines than `fewest_lines` are not deleted.
    """

    name: str
    version: str
    sha256: str
    files: dict[str, bytes]
    fewest_lines: int = FEWEST_LINES


def opened(source: str, indexes: Sequence[str]) -> SourceDistribution:
    """Return a source distribution: an archive, a folder, or NAME[==VERSION] of an index.

    A file of problems like HumanEval is a package with a module for each of them.
    """
    path = Path(source)
    if path.is_dir():
        return _folder(path)
    if path.is_file() and path.name.endswith(PROBLEM_FILES):
        return _problems(path)
    if path.is_file():
        return unpacked(path.name, path.read_bytes())
    if os.sep in source or ARCHIVE.fullmatch(source):
        raise SourceUnavailable(f"{source} is neither a file nor a folder: name one, or a package")
    return _fetched(source, indexes)


def _problems(path: Path) -> SourceDistribution:
    content = path.read_bytes()
    name = path.name.partition(".")[0]
    try:
        files = package_of_problems(name, content)
    except (ValueError, OSError, EOFError) as error:
        raise SourceUnavailable(f"{path} cannot be read: {error}") from error
    return SourceDistribution(name, "1", hashlib.sha256(content).hexdigest(), files, 1)


def _fetched(requirement: str, indexes: Sequence[str]) -> SourceDistribution:
    """Fetch from an index the source distribution that fits, and check its sum."""
    finder = _finder(indexes)
    from packaging.requirements import InvalidRequirement
    from unearth.errors import UnpackError

    try:
        best = finder.find_best_match(requirement).best
        if best is None:
            raise SourceUnavailable(f"no index has a source distribution of {requirement}")
        response = finder.session.get(best.link.url_without_fragment)
        content = bytes(response.content)
    except (InvalidRequirement, UnpackError, OSError, ValueError) as error:
        raise SourceUnavailable(f"{requirement} cannot be fetched: {error}") from error
    found = hashlib.sha256(content).hexdigest()
    stated = _stated_sha256(best.link)
    if stated is None or stated != found:
        raise SourceUnavailable(
            f"{best.link.filename} has the SHA-256 {found}, but the index states {stated}"
        )
    return unpacked(best.link.filename, content)


def _stated_sha256(link: Any) -> str | None:
    """Return the checksum that an index states, in its data or in the link itself."""
    in_link = (link.hash_option or {}).get("sha256") or [None]
    found: str | None = (link.hashes or {}).get("sha256") or in_link[0]
    return found


def _finder(indexes: Sequence[str]) -> Any:
    try:
        from unearth import PackageFinder
    except ImportError:
        raise SourceUnavailable(
            "packages are found on an index by unearth: pip install 'composer-mesh[code-tasks]', "
            "or name an archive"
        ) from None
    return PackageFinder(index_urls=indexes, no_binary=[":all:"], ignore_compatibility=True)


def unpacked(filename: str, content: bytes) -> SourceDistribution:
    """Return what an archive holds, without its first folder."""
    if len(content) > LARGEST_ARCHIVE:
        raise PackageRefused(
            f"its archive has {len(content):,} bytes, more than {LARGEST_ARCHIVE:,}"
        )
    named = ARCHIVE.fullmatch(filename)
    if named is None:
        raise SourceUnavailable(
            f"{filename} is not a source distribution: name a .tar.gz or a .zip"
        )
    reader = _zipped if named[3] == "zip" else _tarred
    files: dict[str, bytes] = {}
    size = 0
    try:
        for path, data in reader(content):
            size += len(data)
            if size > LARGEST_UNPACKED or len(files) > MOST_FILES:
                raise PackageRefused("it unpacks to too much")
            files[path.partition("/")[2]] = data
    except (tarfile.TarError, zipfile.BadZipFile, EOFError, OSError) as error:
        raise SourceUnavailable(f"{filename} cannot be read: {error}") from error
    files.pop("", None)
    sha256 = hashlib.sha256(content).hexdigest()
    return _named(named[1], named[2], sha256, files)


def _named(name: str, version: str, sha256: str, files: dict[str, bytes]) -> SourceDistribution:
    """Return a distribution under the name that its metadata states."""
    about = HeaderParser().parsestr(files.get("PKG-INFO", b"").decode("utf-8", "replace"))
    return SourceDistribution(
        str(about.get("Name") or name), str(about.get("Version") or version), sha256, files
    )


class _BoundedHeader(tarfile.TarInfo):
    """A header, refused if what describes the next one is longer than any description is.

    `tarfile` reads a description at once, with as many bytes as its header states.
    """

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        found = super().frombuf(buf, encoding, errors)
        if found.size < 0 or (found.type in DESCRIBING and found.size > LONGEST_HEADER):
            raise PackageRefused(
                f"its archive has a header of {found.size:,} bytes, and {LONGEST_HEADER:,} are read"
            )
        return found


def _tarred(content: bytes) -> Iterator[tuple[str, bytes]]:
    left = LARGEST_UNPACKED
    with tarfile.open(fileobj=io.BytesIO(content), tarinfo=_BoundedHeader) as archive:
        for member in archive:
            left -= member.size
            if left < 0 or member.size < 0:
                raise PackageRefused("it unpacks to too much")
            if member.isreg():
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def _zipped(content: bytes) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        for info in archive.infolist():
            if not info.is_dir() and info.file_size <= LARGEST_UNPACKED:
                yield info.filename, archive.read(info)


def _folder(folder: Path) -> SourceDistribution:
    """Return the regular files of a folder; its checksum is that of their names and contents."""
    files: dict[str, bytes] = {}
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(folder).as_posix()
            files[name] = path.read_bytes()
            digest.update(f"{name}\0{len(files[name])}\0".encode() + files[name])
        if len(files) > MOST_FILES:
            raise PackageRefused(f"{folder} has more than {MOST_FILES:,} files")
    return _named(folder.resolve().name, "0", digest.hexdigest(), files)
