"""File of a group: the token arrays of its traces, and a JSON body for the rest.

    traces/000/000012.safetensors     ids: every trace's ids in order, contexts and actions
                                      logprobs: of the sampled ids, in the same order
                                      versions, runs: their policy versions, run-length encoded
                                      experts: those of a mixture, if its engine reported them
                                      body: JSON; lengths and stop reasons of turns, messages, ...

Contents are restored bit for bit: log-probs are stored in 32 bits if that is exact, else in 64. A
file is written under a temporary name and renamed once it is on disk. `run.sqlite` lists the groups
and the CRC-32 of each file.

The experts of a group's turns in its file: one array, and the shape of each turn's part.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic_core import to_json
from safetensors import SafetensorError
from safetensors.numpy import load, save

from composer_mesh.actors.checkpoints.manifest import to_disk
from composer_mesh.configs.regular_files import read_regular
from composer_mesh.configs.validation import fail_fast
from composer_mesh.mesh.open_folder import OpenFolder
from composer_mesh.mesh.untrusted_json import parsed_json, short_reason
from composer_mesh.rollouts.traces import ExpertChoices, StopReason, Trace, Turn
from composer_mesh.services.store.rows import DamagedRecord

Shape = tuple[int, int, int]
"""Positions, layers, and experts of a token."""

EXPERTS = {"experts": ("uint8", "uint16")}
"""The array of groups whose turns have experts."""


def shapes_of(trace: Trace) -> list[Shape | None]:
    """Return positions, layers and experts of a token of each turn; empty if no turn has any."""
    found = [turn.experts for turn in trace.turns]
    if not any(found):
        return []
    return [None if one is None else (one.positions, one.layers, one.per_token) for one in found]


def experts_array(found: Sequence[ExpertChoices]) -> dict[str, NDArray[np.generic]]:
    """Return the array of all experts, none without any; raises ValueError for unlike widths."""
    if not found:
        return {}
    if len(widths := {one.width for one in found}) > 1:
        raise ValueError(f"experts of one group have {sorted(widths)} bytes: all are of one model")
    contents = b"".join(one.contents for one in found)
    return {"experts": np.frombuffer(contents, EXPERTS["experts"][widths.pop() - 1])}


class ExpertsReader:
    """The array of experts of a group's file, of which each turn takes what it states."""

    def __init__(self, array: NDArray[np.generic] | None) -> None:
        self._width = 0 if array is None else array.itemsize
        self._left = b"" if array is None else array.tobytes()
        self._at = 0

    def take(self, shape: Shape | None) -> ExpertChoices | None:
        """Return the next experts, of so many positions, layers and experts of a token."""
        if shape is None:
            return None
        positions, layers, per_token = shape
        end = self._at + positions * layers * per_token * self._width
        if min(shape) < 0 or not self._at <= end <= len(self._left):
            raise ValueError(f"experts of {positions} positions are stated, which it has not")
        contents, self._at = self._left[self._at : end], end
        return ExpertChoices(layers, per_token, self._width, contents)

    def check_all_taken(self) -> None:
        """Raise ValueError if it has experts that no turn states."""
        if self._at != len(self._left):
            raise ValueError(f"experts have {len(self._left)} bytes, and {self._at} are stated")


FOLDER = "traces"
SUFFIX = ".safetensors"
GROUPS_IN_A_FOLDER = 1000
FORMAT = "composer-mesh group 1"
REPAIR = "train --resume moves it to quarantine/ and continues without it"
MOST = 1 << 30
"""Size in bytes of the largest group's file that is read."""
IDS = ("uint16", "int32", "int64")
KINDS = {
    "ids": IDS,
    "logprobs": ("float32", "float64"),
    "versions": IDS,
    "runs": IDS,
    "body": ("uint8",),
}
"""Arrays of a group's file and their types."""


@dataclass(frozen=True, slots=True)
class _Head:
    """What the body states of a trajectory, in addition to the fields of its trace.

    `turns` are lengths of context and action, and the stop; `untrained` are those that are context
    only. One that is `further` is another trajectory of the episode before it.
    """

    turns: list[tuple[int, int, StopReason]]
    untrained: list[int] = field(default_factory=list)
    further: bool = False
    experts: list[Shape | None] = field(default_factory=list)
    """Positions, layers and experts of a token of each turn; empty if no turn has any."""


_TRACE, _HEADS = fail_fast(Trace), fail_fast(list[_Head])
OWN = [one.name for one in fields(Trace) if one.name not in ("turns", "others")]
"""Fields of a trace that the body has as they are."""


def path_of(root: Path, group_id: int) -> Path:
    """Return the path of a group's file."""
    folder = f"{group_id // GROUPS_IN_A_FOLDER:03}"
    return root / FOLDER / folder / f"{group_id:06}{SUFFIX}"


def group_of(path: Path) -> int | None:
    """Return the group of a file name, or None if it is not a group file."""
    return int(path.stem) if path.suffix == SUFFIX and path.stem.isdecimal() else None


def group_bytes(traces: Sequence[Trace]) -> bytes:
    """Serialize traces to the content of a group file."""
    every = [one for trace in traces for one in trace.trajectories()]
    turns = [turn for trace in every for turn in trace.turns]
    ids = _joined(part for turn in turns for part in (turn.context_ids, turn.action_ids))
    versions, runs = _runs(_joined(turn.versions for turn in turns))
    body = b"[%s]" % b",".join(
        _stated(one, number > 0)
        for trace in traces
        for number, one in enumerate(trace.trajectories())
    )
    tensors = {
        "ids": _narrow(ids),
        "logprobs": _exact([turn.logprobs for turn in turns]),
        "versions": versions,
        "runs": runs,
        "body": np.frombuffer(body, np.uint8),
        **experts_array([turn.experts for turn in turns if turn.experts is not None]),
    }
    return bytes(save(tensors, {"format": FORMAT}))


def traces_of(content: bytes) -> list[Trace]:
    """Parse the content of a group file; raise ValueError if it is invalid.

    All lengths that the file states are compared with its arrays before anything is allocated.
    """
    try:
        tensors = load(content)
        _refuse_other_arrays(tensors)
        body = parsed_json(tensors["body"].tobytes())
        heads = _HEADS.validate_python(body)
        _refuse_other_lengths(tensors, heads)
        versions = np.repeat(tensors["versions"], tensors["runs"]).tolist()
        arrays = (tensors["ids"].tolist(), tensors["logprobs"].tolist(), versions)
        ids, logprobs, versions = map(iter, arrays)
        experts = ExpertsReader(tensors.get("experts"))
        found = [
            (head.further, _trace(own, head, ids, logprobs, versions, experts))
            for own, head in zip(body, heads, strict=True)
        ]
        experts.check_all_taken()
        return _with_others(found)
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it is not a group's file: {short_reason(error)}") from error


def _refuse_other_arrays(tensors: Mapping[str, NDArray[np.generic]]) -> None:
    """Raise ValueError unless the arrays have the names, the dimension and the types of a group."""
    if set(tensors) - set(EXPERTS) != set(KINDS):
        raise ValueError(f"its arrays are {sorted(tensors)}, not {sorted(KINDS)}")
    kinds = KINDS | EXPERTS
    for name, array in tensors.items():
        if array.ndim != 1 or array.dtype.name not in kinds[name]:
            raise ValueError(f"{name} has {array.ndim} dimensions of {array.dtype.name}")


def _refuse_other_lengths(
    tensors: Mapping[str, NDArray[np.generic]], heads: Sequence[_Head]
) -> None:
    """Raise ValueError unless the lengths of all turns add up to those of the arrays."""
    turns = [turn for head in heads for turn in head.turns]
    if any(context < 0 or action < 0 for context, action, _ in turns):
        raise ValueError("a turn has a negative length")
    sampled, runs = sum(action for _, action, _ in turns), tensors["runs"]
    every = sampled + sum(context for context, _, _ in turns)
    stated = {"ids": every, "logprobs": sampled, "versions": len(runs)}
    for name, length in stated.items():
        if len(tensors[name]) != length:
            raise ValueError(f"{name} has {len(tensors[name])} values, and {length} are stated")
    if any(run < 0 for run in runs.tolist()) or sum(runs.tolist()) != sampled:
        raise ValueError(f"its versions are not those of {sampled} sampled ids")


def write_group(root: Path, group_id: int, traces: Sequence[Trace]) -> tuple[int, int]:
    """Write a group's file to disk; return its size in bytes and its CRC-32.

    Replaces an earlier file of the group. Raises OSError without leaving a file.
    """
    content, path = group_bytes(traces), path_of(root, group_id)
    new = not path.parent.exists()
    with OpenFolder(root) as folder:
        folder.write_whole(str(path.relative_to(root)), content)
    if new:
        to_disk(path.parent.parent)
    return len(content), zlib.crc32(content)


def read_group(root: Path, group_id: int, size: int, crc: int) -> list[Trace]:
    """Read the traces of a group; raise DamagedRecord if its file is missing or modified."""
    path = path_of(root, group_id)
    try:
        content = read_regular(path, MOST)
    except OSError as error:
        raise DamagedRecord(str(path), f"cannot be read: {error.strerror}", REPAIR) from None
    if len(content) != size:
        why = f"it has {len(content)} bytes, and {size} were written"
        raise DamagedRecord(str(path), why, REPAIR)
    if (found := zlib.crc32(content)) != crc:
        why = f"its CRC-32 is {found:08x}, and {crc:08x} was written"
        raise DamagedRecord(str(path), why, REPAIR)
    try:
        return traces_of(content)
    except ValueError as error:
        raise DamagedRecord(str(path), str(error), REPAIR) from None


def _with_others(found: Sequence[tuple[bool, Trace]]) -> list[Trace]:
    """Return the traces, each with the further trajectories that follow it."""
    traces: list[Trace] = []
    for further, trace in found:
        if not further:
            traces.append(trace)
        elif traces:
            traces[-1].others.append(trace)
        else:
            raise ValueError("its first trajectory is a further one of no episode")
    return traces


def _stated(trace: Trace, further: bool) -> bytes:
    """Serialize a trajectory without its token arrays."""
    stated = {
        **{name: getattr(trace, name) for name in OWN},
        "turns": [(len(t.context_ids), len(t.action_ids), t.stop_reason) for t in trace.turns],
        "untrained": [number for number, turn in enumerate(trace.turns) if not turn.trained],
        "further": further,
        "experts": shapes_of(trace),
    }
    return to_json(stated, inf_nan_mode="constants")


def _trace(
    own: Mapping[str, Any],
    head: _Head,
    ids: Iterator[int],
    logprobs: Iterator[float],
    versions: Iterator[int],
    experts: ExpertsReader,
) -> Trace:
    untrained, shapes = set(head.untrained), head.experts or [None] * len(head.turns)
    turns = [
        Turn(
            list(islice(ids, context)),
            list(islice(ids, action)),
            list(islice(logprobs, action)),
            list(islice(versions, action)),
            stop,
            number not in untrained,
            experts.take(shape),
        )
        for number, ((context, action, stop), shape) in enumerate(
            zip(head.turns, shapes, strict=True)
        )
    ]
    found: Trace = _TRACE.validate_python({**own, "turns": turns, "others": []})
    return found


def _joined(parts: Iterable[list[int]]) -> NDArray[np.int64]:
    """Concatenate lists, converting each alone: one long call would block the event loop."""
    arrays = [np.array(part, np.int64) for part in parts]
    return np.concatenate(arrays) if arrays else np.empty(0, np.int64)


def _narrow(values: NDArray[np.int64]) -> NDArray[np.generic]:
    """Cast integers to the smallest type that holds them."""
    top, bottom = (int(values.max()), int(values.min())) if values.size else (0, 0)
    for kind in (np.uint16, np.int32):
        if bottom >= np.iinfo(kind).min and top <= np.iinfo(kind).max:
            return values.astype(kind)
    return values


def _exact(parts: Sequence[list[float]]) -> NDArray[np.floating]:
    """Store numbers in 32 bits, the precision of engines, or in 64 if any value needs it."""
    arrays = [np.array(part, np.float64) for part in parts]
    values = np.concatenate(arrays) if arrays else np.empty(0)
    with np.errstate(over="ignore"):
        short = values.astype(np.float32)
    return short if np.array_equal(short, values) else values


def _runs(values: NDArray[np.int64]) -> tuple[NDArray[np.generic], NDArray[np.generic]]:
    """Run-length encode: return the values and the lengths of the runs."""
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1))
    return _narrow(values[starts]), _narrow(np.diff(starts, append=len(values)))
