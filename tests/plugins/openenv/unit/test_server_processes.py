"""The processes of a server: replaced when they die, given up when they cannot start.

Also where a task may be served, and with what token.
"""

import queue
from pathlib import Path
from typing import Any

import pytest
from served_tasks import worker_start

from composer_mesh.mesh.programs import ProgramFailed
from composer_mesh.plugins.openenv.server.command import ServeOptions, ServerProcesses, WorkerStart
from composer_mesh.services.cli import main
from composer_mesh.services.web.options import ServeRefused


class FakeProgram:
    """Answers as the script says: True, or the reason why it fails."""

    def __init__(self, *script: bool | str) -> None:
        self._script = list(script)
        self.asked: list[bytes] = []
        self.closed = False

    def ask(self, line: bytes, deadline_s: float) -> bytes:
        self.asked.append(line)
        answer = self._script.pop(0) if self._script else True
        if isinstance(answer, str):
            raise ProgramFailed(["worker"], answer)
        return b"fine\n"

    def close(self) -> None:
        self.closed = True


def test_a_dead_process_is_replaced_by_one_with_the_same_start(
    tmp_path: Path, build_config: Any
) -> None:
    first, second = FakeProgram(True, True, "it has ended"), FakeProgram()
    programs, said = iter([first, second]), queue.Queue[str]()
    starts = [worker_start(tmp_path, build_config())]
    processes = ServerProcesses(starts, said.put, lambda: next(programs), every_s=0.001)
    processes.start()
    assert "is replaced" in said.get(timeout=60)
    while not second.asked:
        assert not processes.gave_up.wait(0.001)
    processes.close()
    assert second.asked[0] == first.asked[0]
    assert second.asked[-1] == b"stop"
    assert (first.closed, second.closed) == (True, True)


def test_a_process_that_never_starts_again_ends_the_server(
    tmp_path: Path, build_config: Any
) -> None:
    programs = iter([FakeProgram(True, "dead"), *(FakeProgram("broken") for _ in range(9))])
    said = queue.Queue[str]()
    starts = [worker_start(tmp_path, build_config())]
    processes = ServerProcesses(starts, said.put, lambda: next(programs), every_s=0.001)
    processes.start()
    assert processes.gave_up.wait(60)
    processes.close()


def test_a_task_that_cannot_be_made_refuses_the_server_and_leaves_no_process(
    tmp_path: Path, build_config: Any
) -> None:
    made = [FakeProgram(), FakeProgram("UnusableTask: no rows")]
    programs = iter(made)
    starts = [worker_start(tmp_path, build_config(), number) for number in range(2)]
    with pytest.raises(ServeRefused, match="no rows"):
        ServerProcesses(starts, print, lambda: next(programs)).start()
    assert all(one.closed for one in made)


def test_a_process_that_the_machine_has_no_room_for_is_tried_again(
    tmp_path: Path, build_config: Any
) -> None:
    second, said = FakeProgram(), queue.Queue[str]()
    made = iter([FakeProgram(True, "dead"), OSError(11, "no more processes"), second])

    def make() -> FakeProgram:
        program = next(made)
        if isinstance(program, OSError):
            raise program
        return program

    starts = [worker_start(tmp_path, build_config())]
    processes = ServerProcesses(starts, said.put, make, every_s=0.001)
    processes.start()
    assert "dead" in said.get(timeout=60)
    assert "no more processes" in said.get(timeout=60)
    while not second.asked:
        assert not processes.gave_up.wait(0.001)
    processes.close()
    assert second.asked[-1] == b"stop"


LONG = "0123456789abcdef"


def test_the_token_is_in_no_text_of_a_start(build_config: object) -> None:
    start = WorkerStart(
        options=ServeOptions(),
        config=build_config(),  # type: ignore[operator]
        folder="x",
        number=0,
        token=LONG,
    )
    assert LONG not in repr(start)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--port", "70000"], "--port"),
        (["--processes", "0"], "--processes"),
        (["--max-sessions", "0"], "--max-sessions"),
        (["--session-timeout", "1e9"], "--session-timeout"),
        (["--host", "8.8.8.8"], "--any-address"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_starts(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve-env", "toolbox", *words]) == 2
    assert reason in capsys.readouterr().err
