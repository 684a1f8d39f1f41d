"""Checks that each token was sampled from its recorded version, by recomputing its log-prob.

The weights of every checkpoint of the run are kept. A token whose recorded log-prob differs from
its version's was sampled from other weights, or by an incorrect engine; both are counted. The same
traces under a neighbouring checkpoint show the power of this test: many tokens of a sharp policy
are certain under both, but hardly any trace is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from composer_mesh.actors.models.policy import load_model
from composer_mesh.rollouts.packing import microbatches
from composer_mesh.rollouts.traces import Trace

TOLERANCE = 5e-5
"""Nats between two float32 computations of one log-prob in different batches."""
BUDGET = 16_384


@dataclass(frozen=True)
class Checked:
    """Tokens whose version was checked, those it contradicts, the share of traces with a token
    that a neighbouring version contradicts, and the largest error of a version on its own
    tokens."""

    tokens: int = 0
    stale: int = 0
    versions: int = 0
    power: float = 0.0
    worst_nats: float = 0.0


def policies(kept: Path, initial: Path | None) -> dict[int, list[Path]]:
    """Return folders by version; one written twice has two, and either may be the true one."""
    found: dict[int, list[Path]] = {} if initial is None else {0: [initial]}
    for folder in sorted(kept.glob("step-*.*")):
        found.setdefault(int(folder.name.partition("-")[2].partition(".")[0]), []).append(folder)
    return found


def check_versions(
    traces: Sequence[Trace], folders: Mapping[int, Sequence[Path]], temperature: float
) -> Checked:
    """Check every token against its version, where that version's weights are kept."""
    own: list[torch.Tensor] = []
    foreign: list[torch.Tensor] = []
    versions = 0
    for version in sorted(folders):
        claimed = [trace for trace in traces if version in _versions(trace)]
        if not claimed:
            continue
        versions += 1
        asked = [_errors(claimed, version, folder, temperature) for folder in folders[version]]
        own += map(_smallest, zip(*asked, strict=True))
        if (other := _neighbour(folders, version)) is not None:
            foreign += _errors(claimed, version, other, temperature)
    return _checked(own, foreign, versions)


def _checked(
    own: Sequence[torch.Tensor], foreign: Sequence[torch.Tensor], versions: int
) -> Checked:
    if not own:
        return Checked()
    errors = torch.cat(list(own))
    seen = sum(bool((trace > TOLERANCE).any()) for trace in foreign)
    return Checked(
        len(errors),
        int((errors > TOLERANCE).sum()),
        versions,
        seen / len(foreign) if foreign else 0.0,
        float(errors.max()),
    )


def _versions(trace: Trace) -> set[int]:
    return {version for turn in trace.turns for version in turn.versions}


def _neighbour(folders: Mapping[int, Sequence[Path]], version: int) -> Path | None:
    others = sorted((abs(other - version), other) for other in folders if other != version)
    return folders[others[0][1]][0] if others else None


def _smallest(errors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a trace's errors under the folder that fits it best."""
    return min(errors, key=lambda one: float(one.max()))


@torch.no_grad()
def _errors(
    traces: Sequence[Trace], version: int, folder: Path, temperature: float
) -> list[torch.Tensor]:
    """Return, per trace, the log-prob errors of the tokens with this version."""
    model = load_model(folder)
    lengths = [len(trace.token_ids()) for trace in traces]
    found: list[torch.Tensor] = []
    for indices in microbatches(lengths, max([BUDGET, *lengths])):
        batch = [traces[index] for index in indices]
        found += [
            (torch.tensor(recorded, dtype=torch.float64) - given.double()).abs()
            for recorded, given in _pairs(model, batch, version, temperature)
        ]
    return found


def _pairs(
    model: Any, batch: Sequence[Trace], version: int, temperature: float
) -> Iterator[tuple[list[float], torch.Tensor]]:
    """Yield the recorded and recomputed log-probs of one version's tokens, trace by trace."""
    width = max(len(trace.token_ids()) for trace in batch)
    ids = torch.zeros(len(batch), width, dtype=torch.long)
    for row, trace in enumerate(batch):
        own = trace.token_ids()
        ids[row, : len(own)] = torch.tensor(own)
    logits = model(input_ids=ids, use_cache=False).logits.float() / temperature
    for row, trace in enumerate(batch):
        places, recorded = _claims(trace, version)
        where = torch.tensor(places)
        given = torch.log_softmax(logits[row, where - 1], -1)
        yield recorded, given.gather(-1, ids[row, where][:, None])[:, 0]


def _claims(trace: Trace, version: int) -> tuple[list[int], list[float]]:
    """Return the positions in the trace of the tokens with this version, and their log-probs."""
    places, recorded, start = [], [], 0
    for turn in trace.turns:
        start += len(turn.context_ids)
        for offset, (logprob, own) in enumerate(zip(turn.logprobs, turn.versions, strict=True)):
            if own == version:
                places.append(start + offset)
                recorded.append(logprob)
        start += len(turn.action_ids)
    return places, recorded
