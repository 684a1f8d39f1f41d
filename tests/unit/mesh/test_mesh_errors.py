"""The errors that cross processes: they travel whole, and say what happened."""

from __future__ import annotations

import pickle

import pytest

from composer_mesh.actors.engines.port import DecodingDeadlineExceeded, RequestAborted
from composer_mesh.mesh.admin import AdminUnreachable
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, RemoteError, reason_of
from composer_mesh.mesh.transport import TransportError
from composer_mesh.mesh.weights.manifest import (
    PublisherGone,
    TornWeights,
    TransportUnavailable,
    WeightsMismatch,
    WrongChecksum,
)


@pytest.mark.parametrize(
    "error",
    [
        ActorDied("generator-1", "Killed(sig=9)"),
        DeadlineExceeded("trainer", "step", 120.0),
        RemoteError("trainer", "step", "Traceback ...\nValueError: no"),
        TransportError("out has strides (1, 2)"),
        TornWeights(3, 3, -1),
        WrongChecksum("embed.weight", 1, 3),
        PublisherGone("shm", "process 7"),
        TransportUnavailable("shm", "the run has 2 hosts", "set weights.transport to rdma"),
        WeightsMismatch("lm_head.weight is missing"),
        AdminUnreachable("nobody answers"),
        RequestAborted("train-000001-003-02", "its caller gave it up"),
        DecodingDeadlineExceeded("train-000001-003-02", 60.0),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_travels_whole(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert copy.args == error.args
    assert copy.__dict__ == error.__dict__
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    ("report", "reason"),
    [
        (
            "Endpoint call a.b() failed, The actor <root>.<A a> and all its descendants have "
            "failed:\n  the process this actor was running on failed: Killed(sig=9)",
            "the process this actor was running on failed: Killed(sig=9)",
        ),
        (
            "Supervision event: actor <root>.<A a> failed:\n  aborted due to: Traceback (most "
            'recent call last):\n  File "a.py", line 1\nValueError: x is 3\n',
            "ValueError: x is 3",
        ),
        (
            "Endpoint call a.b() failed, Supervision event: actor <root>.<A a> has status: "
            "stopped: stopped by client",
            "it was stopped",
        ),
        ("something else", "something else"),
        ("", "no reason was reported"),
    ],
)
def test_the_reason_is_told_without_the_way_to_the_actor(report: str, reason: str) -> None:
    assert reason_of(report) == reason
