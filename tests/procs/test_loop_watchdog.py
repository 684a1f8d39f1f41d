"""The harness that every process test has: an actor whose event loop stands still is found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import loop_reports
import pytest
from echo_actors import EchoActor
from live_run import wait_until

from composer_mesh.mesh.loop_watchdog import REPORTS
from composer_mesh.mesh.spawn import MeshHost

NEWS_S = 120.0
"""How long a report may take to be written, on a machine that is busy with other things."""


async def test_an_actor_that_blocks_its_event_loop_is_reported_with_the_place(
    host: MeshHost,
) -> None:
    actor = await host.spawn("echo", EchoActor)
    await actor.call("spin", 3.0)
    assert loop_reports.taken() == []
    await actor.call("sleep_on_loop", 3.0)
    (found,) = await asyncio.to_thread(wait_until, loop_reports.taken, "report", NEWS_S)
    assert found["event"] == "event_loop_blocked"
    assert (found["process"], found["seconds"] > 0.5) == ("echo", True)
    assert "in sleep_on_loop" in found["stack"]


def test_a_report_that_is_being_written_when_somebody_looks_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look may come when its file exists and is empty, or within its line."""
    monkeypatch.setenv(REPORTS, str(tmp_path))
    with (tmp_path / "echo-1.jsonl").open("a", encoding="utf-8") as lines:
        for part in ("", '{"process": ', '"echo"}'):
            lines.write(part)
            lines.flush()
            assert loop_reports.taken() == []
        lines.write('\n{"process"')
        lines.flush()
        assert loop_reports.taken() == [{"process": "echo"}]
        lines.write(': "echo"}\n')
    assert loop_reports.taken() == [{"process": "echo"}]
    assert loop_reports.taken() == []
