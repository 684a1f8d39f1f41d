"""Models and datasets of a hub, which huggingface_hub downloads into its own cache.

Endpoint, token, cache, offline mode and progress bars are its settings: HF_ENDPOINT, HF_TOKEN,
HF_HOME, HF_HUB_OFFLINE and their like. Of a model's repository only files of the formats below are
downloaded, and none of its folders: no pickles and no code. A dataset of folders is taken whole.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

from composer_mesh.configs.errors import ConfigError, one_line, shown
from composer_mesh.configs.hub import GGUF, HubId

SMALL = ("*.json", "*.jinja", "*.model", "*.txt")
"""Config, tokenizer, chat template and generation config; and the index of the weights."""
WEIGHTS = "*.safetensors"
LEFT_OUT = ("*/*", "consolidated*")
README = "README.md"
NOT_STORED = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR)


def small_files(named: HubId, key: str) -> Path:
    """Return the folder of a model's files without its weights, whose name is the commit.

    Raises ConfigError; `key` is the config's, for its message.
    """
    return _snapshot(named, key, list(SMALL))


def whole_model(named: HubId, key: str, cache_dir: Path | None = None) -> Path:
    """Return the folder of a model with its weights, or its GGUF file; raises ConfigError."""
    wanted = [named.part] if named.part else [WEIGHTS, *SMALL]
    return _snapshot(named, key, wanted, cache_dir)


def commit_of(named: HubId, key: str, kind: str) -> str:
    """Return the commit of a revision; `kind` is "model" or "dataset". Raises ConfigError."""
    return _snapshot(named, key, [README], kind=kind).name


def dataset_folder(named: HubId, key: str) -> Path:
    """Return a folder with all files of a dataset, or the part of it that an id names.

    They are files, not links into the cache. Raises ConfigError.
    """
    from huggingface_hub import constants

    commits = Path(constants.HF_HOME, "composer-mesh", *named.repo.split("/"))
    folder = commits / commit_of(named, key, "dataset")
    if not folder.exists():
        snapshot = _snapshot(named.at(folder.name), key, None, kind="dataset")
        with refusing(named, key, "dataset"):
            commits.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(dir=commits) as scratch:
                copy = Path(shutil.copytree(snapshot, Path(scratch) / "copy"))
                if not folder.exists():  # another process may have been first
                    copy.rename(folder)
    if not (folder / named.part).is_dir():
        raise _refused(key, named, f"it has no folder {named.part!r}: correct what follows the :")
    return folder / named.part


def digest_of(named: HubId, key: str) -> str | None:
    """Return the SHA-256 of the file that an id names; None where no hub answers.

    Raises ConfigError where the repository has no such file.
    """
    files = files_of(named)
    if files is not None and named.part not in files:
        others = ", ".join(sorted(name[:80] for name in files if name.endswith(GGUF))[:8])
        why = f"it has no {named.part}: write one of its GGUF files: {others or 'it has none'}"
        raise _refused(key, named, why)
    return None if files is None else files[named.part][1]


def cache_of(folder: Path) -> Path:
    """Return the cache in which a model's folder is."""
    return folder.parents[2]


def _snapshot(
    named: HubId,
    key: str,
    wanted: list[str] | None,
    cache_dir: Path | None = None,
    kind: str = "model",
) -> Path:
    """Return the folder of a commit with the wanted files, or with all of them if None."""
    from huggingface_hub import snapshot_download

    with refusing(named, key, kind):
        found = snapshot_download(
            named.repo,
            repo_type=kind,
            revision=named.revision or None,
            cache_dir=cache_dir,
            allow_patterns=wanted,
            ignore_patterns=list(LEFT_OUT) if wanted is not None else None,
        )
    return Path(found)


@cache
def files_of(named: HubId) -> Mapping[str, tuple[int, str]] | None:
    """Return the bytes and the digest of each file of a commit; None where no hub answers."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled
    from huggingface_hub.hf_api import RepoFile

    try:
        tree = HfApi().list_repo_tree(named.repo, revision=named.revision)
        return {
            one.path: (one.size, one.lfs.sha256 if one.lfs else one.blob_id)
            for one in tree
            if isinstance(one, RepoFile)
        }
    except (HTTPError, OfflineModeIsEnabled):  # the cached files are used
        return None


def is_weight(name: str, part: str = "") -> bool:
    """Whether a file of a repository has weights that are downloaded, or is the part of an id."""
    if part:
        return name == part
    return fnmatch(name, WEIGHTS) and not any(fnmatch(name, one) for one in LEFT_OUT)


def refuse_other_formats(named: HubId, key: str) -> None:
    """Raise ConfigError for a repository without weights that are read here."""
    files = files_of(named)
    if files is None:
        return
    names = sorted(name[:80] for name in files)
    if any(is_weight(name) for name in names):
        return
    if found := [name for name in names if name.endswith(GGUF)]:
        raise _refused(key, named, f"has GGUF files alone: write {named.repo}:{found[0]}")
    found = [name for name in names if name.endswith((".bin", ".pt", ".pth", ".msgpack", ".h5"))]
    why = f"only {', '.join(found[:3])}, and pickles are never loaded" if found else "nor others"
    repair = "name a model or a revision with safetensors, or convert them"
    raise _refused(key, named, f"has no weights as safetensors, {why}: {repair}")


def upload(folder: Path, repo: str, what: str, revision: str | None, private: bool) -> str:
    """Upload a folder as one commit of a model's repository, which is made; return its address.

    Raises ConfigError.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    api = HfApi()
    try:
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, revision=revision, commit_message=what)
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            one_line(
                f"{repo} cannot be uploaded ({_reason(error)}): set HF_TOKEN to a token that may "
                "write there, correct the id or HF_ENDPOINT, and try again"
            )
        ) from None
    return str(url)


@contextmanager
def refusing(named: HubId, key: str, kind: str) -> Iterator[None]:
    """Turn what huggingface_hub raises into one ConfigError with the repair."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (HTTPError, OSError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise _refused(key, named, _why(error, named, kind)) from None


def _refused(key: str, named: HubId, why: str) -> ConfigError:
    return ConfigError(one_line(f"{key} = {shown(str(named))}: {why}"))


def _why(error: Exception, named: HubId, kind: str) -> str:
    from huggingface_hub import constants, errors, get_token

    where, page = _host(constants.ENDPOINT), "datasets/" if kind == "dataset" else ""
    token = "the token of this account" if get_token() else "a request without a token"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"access to it is granted by its owner, and {token} has none: accept its terms at "
            f"{where}/{page}{named.repo}, and set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is neither such a path in the working directory, nor a {kind} of that id at "
            f"{where} that {token} may read: correct it, or set HF_TOKEN for a private one"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {named.revision!r}: correct what follows the @, or remove it"
    if isinstance(error, errors.LocalEntryNotFoundError):
        return _unreachable(where, constants.HF_HUB_OFFLINE)
    if isinstance(error, shutil.Error) or getattr(error, "errno", None) in NOT_STORED:
        what = getattr(error, "strerror", None) or "not all of its files were copied"
        return f"it cannot be stored ({what}): make room, or set HF_HOME to another place"
    if isinstance(error, errors.HFValidationError):
        return (
            "this is not an id of a hub, and no such path is in the working directory: correct it"
        )
    return f"its download failed ({_reason(error)}): try again, which continues where it ended"


def _unreachable(where: str, offline: bool) -> str:
    if offline:
        return (
            "there is neither such a path in the working directory, nor are its files in the cache "
            "of HF_HOME while HF_HUB_OFFLINE is set: unset it once to download them"
        )
    return (
        f"there is no such path in the working directory, and {where} gave no answer, nor are its "
        "files in the cache of HF_HOME: correct the path, the network or HF_ENDPOINT"
    )


def _reason(error: Exception) -> str:
    """Return a short reason without addresses, which may be signed."""
    answer: Any = getattr(error, "response", None)
    status = getattr(answer, "status_code", None)
    said = f"status {status}" if status else str(error).partition("\n")[0][:120]
    return type(error).__name__ if "://" in said else f"{type(error).__name__}: {said}"


def _host(endpoint: str) -> str:
    """Return an endpoint without a user and a password."""
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
