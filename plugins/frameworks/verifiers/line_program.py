"""A program that is spoken to in lines for as long as it is of use."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from composer_mesh.mesh.programs import MOST_ANSWER_BYTES, TiedProgram

LAST_LINES, LONGEST_LINE = 20, 4096


class LineProgram:
    """A program that is told lines, and says lines whenever it has some.

    It ends with this process, with all that it started. What it writes to its error stream goes to
    the stream of this process too; the end of it is in `last_words`.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        """Start it; raises `ProgramFailed` if it is not there."""
        self._program = TiedProgram(command, env, folder)
        self._input, self._output, self._errors = self._program.streams
        self._said: deque[str] = deque(maxlen=LAST_LINES)
        self._sending, self._closing, self._closed = threading.Lock(), threading.Lock(), False
        self._listening = threading.Thread(target=self._listen, name=command[0], daemon=True)
        self._listening.start()

    def send(self, line: str) -> None:
        """Tell it a line. Waits while it does not read; raises BrokenPipeError after its end."""
        with self._sending:
            self._input.write(f"{line}\n".encode())
            self._input.flush()

    def lines(self) -> Iterator[str]:
        """Yield its lines until it ends, or says one that is too long."""
        with self._output as said:
            while (line := said.readline(MOST_ANSWER_BYTES)).endswith(b"\n"):
                yield line.decode("utf-8", "replace")

    def last_words(self) -> str:
        """Return the end of its error stream; call it after its end."""
        self._listening.join()
        return "".join(self._said)[-2000:].strip()

    def close(self, grace_s: float) -> int:
        """End its input, kill it after so many seconds, and return its status. May be repeated."""
        with self._closing:
            if not self._closed:
                self._closed = True
                if self._sending.acquire(timeout=grace_s):
                    self._end_input()
                    self._sending.release()
                self._program.ends_within(grace_s)
                self._program.close()
            status = self._program.wait()
            self._end_input()
            return status

    def _end_input(self) -> None:
        with contextlib.suppress(OSError):  # it has ended before
            self._input.close()

    def _listen(self) -> None:
        with self._errors as errors:
            while line := errors.readline(LONGEST_LINE):
                text = line.decode("utf-8", "replace")
                self._said.append(text)
                sys.stderr.write(text)
