"""The first program in a box: unpacks the tree, runs one command, and reports what it changed.

It runs with the rights of the command, so nothing of what it reports is believed outside. It is
started for each command: it imports only what costs no time, and nothing of ours but `records`.
Its only stream is the socket that is its standard input. A socket cannot be opened through /proc,
so the command cannot write to it.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found] # `signal` itself imports enum
import marshal
import os
import select
import stat
import time
from resource import RLIMIT_AS, RLIMIT_CPU, RLIMIT_FSIZE, RLIMIT_NOFILE, RLIMIT_NPROC, setrlimit

from composer_mesh.mesh.sandboxes import records

WORK = "/w"
LONGEST_PATH = 300
MOST_FILES = 10_000
MOST_REFUSED = 100
CHUNK = 1 << 16
RULE_BYTES = 8
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
NO_JOB = 124
"""Exit status of a box whose keeper ended before it had sent what to run."""


class BoxJob:
    """What to run."""

    def __init__(
        self,
        argv: list[bytes],
        environment: dict[bytes, bytes],
        files: dict[bytes, bytes],
        limits: dict[str, int],
        stdin: bytes,
    ) -> None:
        self.argv, self.environment, self.files = argv, environment, files
        self.limits, self.stdin = limits, stdin


class Streams:
    """Standard input, output and error of the command; output is kept up to a limit."""

    def __init__(self, stdin: bytes, limit: int) -> None:
        self._left, self._limit = memoryview(stdin), limit
        self.child_in, self._input = os.pipe()
        self._output, self.child_out = os.pipe()
        self._errors, self.child_err = os.pipe()
        self.kept = {self._output: bytearray(), self._errors: bytearray()}
        self.cut = False

    def begin(self, waiting: select.poll) -> None:
        """Close the command's ends, and wait for ours."""
        for descriptor in (self.child_in, self.child_out, self.child_err):
            os.close(descriptor)
        for descriptor in (self._input, *self.kept):
            os.set_blocking(descriptor, False)
        for descriptor in self.kept:
            waiting.register(descriptor, select.POLLIN)
        waiting.register(self._input, select.POLLOUT)
        self._feed(waiting)

    def step(self, descriptor: int, waiting: select.poll) -> None:
        """Move bytes of a stream that is ready."""
        if descriptor == self._input:
            self._feed(waiting)
        elif not self._read(descriptor):
            waiting.unregister(descriptor)

    def drain(self) -> None:
        """Read the rest from the pipes; nobody writes any more."""
        for descriptor in self.kept:
            try:
                while self._read(descriptor):
                    pass
            except BlockingIOError:
                pass

    def texts(self) -> list[bytes]:
        """Return what was kept of standard output and standard error."""
        return [bytes(text) for text in self.kept.values()]

    def _read(self, descriptor: int) -> bool:
        piece = os.read(descriptor, CHUNK)
        kept = self.kept[descriptor]
        remaining = self._limit - len(kept)
        kept += piece[:remaining]
        self.cut = self.cut or len(piece) > remaining
        return bool(piece)

    def _feed(self, waiting: select.poll) -> None:
        try:
            while self._left:
                self._left = self._left[os.write(self._input, self._left[:CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass
        waiting.unregister(self._input)
        os.close(self._input)


def main(rules: int | None = None) -> None:
    """Run the job that comes from the socket, and report it.

    First load the filter of system calls from a descriptor, if the launcher has not.
    """
    if rules is not None:
        load_filter(rules)
    os.closerange(3, 1 << 20)
    job = read_job()
    unpack(job.files)
    silence()
    send(records.record(records.STARTED))
    began = time.monotonic()
    streams = Streams(job.stdin, job.limits["output_bytes"])
    ended = execute(job, streams)
    end_all_others()
    streams.drain()
    seconds = repr(time.monotonic() - began).encode()
    send(ended + records.record(records.SECONDS, data=seconds))
    output, errors = streams.texts()
    send(records.record(records.STDOUT, data=output) + records.record(records.STDERR, data=errors))
    if streams.cut:
        send(records.record(records.CUT))
    report_changes(job)
    send(records.record(records.END))
    os._exit(0)  # nothing is left to tidy up


def load_filter(rules: int) -> None:
    """Give this process and its children a filter, as the kernel takes it."""
    import ctypes

    class Program(ctypes.Structure):
        _fields_ = [("count", ctypes.c_ushort), ("rules", ctypes.c_char_p)]

    with open(f"/proc/self/fd/{rules}", "rb") as file:
        content = file.read()
    program = Program(len(content) // RULE_BYTES, content)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def read_job() -> BoxJob:
    """Return what is sent; if the stream ends before, so does the box."""
    with open(0, "rb", buffering=1 << 20, closefd=False) as source:
        size = records.lengths_of(source.read(records.HEAD_BYTES))[2]
        content = source.read(size)
    if not size or len(content) < size:
        os._exit(NO_JOB)
    return BoxJob(*marshal.loads(content))


def unpack(files: dict[bytes, bytes]) -> None:
    """Write the tree into the work folder."""
    made = set()
    for path, content in files.items():
        folder, _, _ = path.rpartition(b"/")
        if folder not in made:
            os.makedirs(os.path.join(WORK.encode(), folder), exist_ok=True)
            made.add(folder)
        with open(os.path.join(WORK.encode(), path), "wb") as file:
            file.write(content)


def silence() -> None:
    """Give up the streams on which the box's own failures are said."""
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, 1)
    os.dup2(empty, 2)
    os.close(empty)


def execute(job: BoxJob, streams: Streams) -> bytes:
    """Run the command to its end or its deadline; return the record of how it ended."""
    child = os.fork()
    if child == 0:
        become(job, streams)
    waiting = select.poll()
    streams.begin(waiting)
    end = os.pidfd_open(child)
    waiting.register(end, select.POLLIN)
    until = time.monotonic() + job.limits["wall_ms"] / 1000
    while (left := until - time.monotonic()) > 0:
        ready = [descriptor for descriptor, _ in waiting.poll(left * 1000)]
        if end in ready:
            return ended_by(child, job.limits["cpu_s"])
        for descriptor in ready:
            streams.step(descriptor, waiting)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return records.record(records.LATE)


def ended_by(child: int, cpu_s: int) -> bytes:
    """Return the record of a finished command's status."""
    _, status, used = os.wait4(child, 0)
    if os.WIFEXITED(status):
        return records.record(records.EXITED, data=b"%d" % os.WEXITSTATUS(status))
    ended = os.WTERMSIG(status)  # SIGXCPU at the limit; SIGKILL a second later
    if ended == signal.SIGXCPU or (
        ended == signal.SIGKILL and used.ru_utime + used.ru_stime >= cpu_s
    ):
        return records.record(records.SPENT)
    return records.record(records.SIGNALLED)


def become(job: BoxJob, streams: Streams) -> None:
    """Become the command, with its limits and none of our descriptors."""
    try:
        os.setsid()
        for place, descriptor in enumerate(
            (streams.child_in, streams.child_out, streams.child_err)
        ):
            os.dup2(descriptor, place)
        os.closerange(3, 1 << 20)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
            signal.signal(number, signal.SIG_DFL)
        limit(job.limits)
        os.chdir(WORK)
        os.execvpe(job.argv[0], job.argv, job.environment)
    except OSError as error:
        os.write(2, b"%s: %s\n" % (job.argv[0][:200], (error.strerror or "").encode()))
    finally:
        os._exit(127)


def limit(limits: dict[str, int]) -> None:
    """Set the limits of this process and of all that it starts."""
    setrlimit(RLIMIT_CPU, (limits["cpu_s"], limits["cpu_s"] + 1))
    for kind, name in (
        (RLIMIT_AS, "memory_bytes"),
        (RLIMIT_FSIZE, "file_bytes"),
        (RLIMIT_NOFILE, "open_files"),
        (RLIMIT_NPROC, "processes"),
    ):
        setrlimit(kind, (limits[name], limits[name]))


def end_all_others() -> None:
    """Kill all that the command left; the kernel lets none of it fork in between."""
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        return


def report_changes(job: BoxJob) -> None:
    """Send files that were made, changed or removed, and the names of what is not taken over."""
    changes = FolderChanges(job.files, job.limits["file_bytes"], job.limits["disk_bytes"])
    changes.walk(b"")
    for path in job.files.keys() - changes.seen:
        send(records.record(records.REMOVED, path))


class FolderChanges:
    """What the work folder has that the tree had not.

    A file of the tree in whose place something lies that is refused stays as it was.
    """

    def __init__(self, files: dict[bytes, bytes], file_bytes: int, disk_bytes: int) -> None:
        self._files, self._file_bytes, self._left = files, file_bytes, disk_bytes
        self.seen: set[bytes] = set()
        self._count = self._refused = 0

    def walk(self, folder: bytes) -> None:
        """Report a folder and those in it; paths are short, so the depth is bounded."""
        full = os.path.join(WORK.encode(), folder)
        if os.lstat(full).st_mode & 0o700 != 0o700:
            os.chmod(full, 0o700)
        for name in os.listdir(full):
            path = os.path.join(folder, name)
            mode = os.lstat(os.path.join(full, name)).st_mode
            if len(path) > LONGEST_PATH:
                self._refuse(path)
            elif stat.S_ISDIR(mode):
                self.walk(path)
            elif stat.S_ISREG(mode):
                self._file(path)
            else:
                self._refuse(path)

    def _file(self, path: bytes) -> None:
        full = os.path.join(WORK.encode(), path)
        size, before = os.lstat(full).st_size, self._files.get(path)
        unlike = before is None or size != len(before)
        if unlike and (size > min(self._file_bytes, self._left) or self._count >= MOST_FILES):
            return self._refuse(path)
        content = contents(full)
        self.seen.add(path)
        if content != before:
            self._left -= len(content)
            self._count += 1
            send(records.record(records.FILE, path, content))
        return None

    def _refuse(self, path: bytes) -> None:
        self.seen.add(path)
        self._refused += 1
        if self._refused <= MOST_REFUSED:
            send(records.record(records.REFUSED, path[:LONGEST_PATH]))


def contents(full: bytes) -> bytes:
    """Return a file's bytes, also where the command took its own right to read it away."""
    if not os.lstat(full).st_mode & 0o400:
        os.chmod(full, 0o600)
    with open(full, "rb") as file:
        return file.read()


def send(data: bytes) -> None:
    """Write all of it to the socket."""
    left = memoryview(data)
    while left:
        left = left[os.write(0, left) :]
