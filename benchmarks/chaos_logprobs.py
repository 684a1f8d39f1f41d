"""Checks that each token was sampled from its recorded version, by recomputing its log-prob.

The weights of every checkpoint of the run are kept. A token whose recorded log-prob differs from
its version's was sampled from other weights, or by an incorrect engine; both are counted. The same
traces under a neighbouring checkpoint show the power of this test: many tokens of a sharp policy
are certain under both, but hardly any trace is.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from composer_mesh.actors.models.policy import load_model
from composer_mesh.channels.policy import policy_sample
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
        errors = [_errors(claimed, version, folder, temperature) for folder in folders[version]]
        own += map(_smallest, zip(*errors, strict=True))
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
    samples = [policy_sample(trace, 0.0) for trace in traces]
    lengths = [len(one.ids) for one in samples]
    found: list[torch.Tensor] = []
    for indices in microbatches(lengths, max([BUDGET, *lengths])):
        batch = [samples[index] for index in indices]
        rows = [torch.tensor(one.ids) for one in batch]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        logits = model(input_ids=ids, use_cache=False).logits.float() / temperature
        given = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        for row, one in enumerate(batch):
            own = torch.tensor(one.versions[1:]) == version
            recorded = torch.tensor(one.logprobs[1:], dtype=torch.float64)
            found.append((recorded[own] - given[row, : len(own)][own].double()).abs())
    return found
