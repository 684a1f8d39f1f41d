"""TensorBoard: event files by its own writer, without torch and TensorFlow."""

from __future__ import annotations

from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from composer_mesh.configs.tracking import TensorboardTracking
from composer_mesh.services.trackers.port import TrackedRun, TrackedStep

FLUSH_S = 5


class TensorboardTracker:
    """Writes an event file for each process of the run, all in one folder."""

    def __init__(self, section: TensorboardTracking) -> None:
        self._folder: Path | None = section.folder
        self._writer: EventFileWriter | None = None

    def start(self, run: TrackedRun) -> str:
        folder = run.folder if self._folder is None else self._folder / run.name
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        return f"tensorboard --logdir {folder}"

    def log(self, step: TrackedStep) -> None:
        assert self._writer is not None
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in step.values.items()
        ]
        event = Event(step=step.step, wall_time=step.at, summary=Summary(value=values))
        self._writer.add_event(event)

    def finish(self, state: str) -> None:  # noqa: ARG002  event files have no state
        assert self._writer is not None
        self._writer.close()
