"""What a process reports of its progress."""

from __future__ import annotations

from composer_mesh.mesh.progress import Progress, ProgressReport


class Clock:
    """A clock that the test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_report_says_what_was_completed_last_and_how_long_ago() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress.made("microbatch 2 of 8")
    progress.made("microbatch 3 of 8")
    clock.now = 70.0
    found = ProgressReport.of({"progress": progress.report()})
    assert found == ProgressReport(2, "microbatch 3 of 8", 70.0)
    assert str(found) == "last progress: microbatch 3 of 8, 70 s before"


def test_a_report_names_whom_the_work_waits_for() -> None:
    progress = Progress(Clock())
    progress.made("microbatch 3 of 8")
    with progress.waiting("the SDPO teachers"):
        found = ProgressReport.of({"progress": progress.report()})
    assert str(found).endswith("before, now waiting for the SDPO teachers")
    assert not progress.report()["waits_for"]


def test_an_actor_of_another_kind_reports_nothing() -> None:
    assert ProgressReport.of({"kind": "stranger"}) is None
