"""Each tracker's own package writes a run that its own reader reads back.

`nox -s trackers` runs this with the packages in an environment of their own.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from composer_mesh.configs.tracking import (
    MlflowTracking,
    OpentelemetryTracking,
    PrometheusTracking,
    TensorboardTracking,
    TrackioTracking,
    WandbTracking,
)
from composer_mesh.services.trackers.port import (
    TrackedRun,
    TrackedStep,
    check_trackers,
    make_tracker,
)

pytest.importorskip("wandb", reason="needs the packages of trackers: run `nox -s trackers`")

STEPS = 3
RUN = {"run": {"name": "unit"}, "trainer": {"lr": 3e-4}}


def step_of(number: int) -> TrackedStep:
    metrics = {
        "time/step_s": 2.0,
        "time/wait_batch_s": 0.5,
        "time/train_s": 1.0,
        "time/weight_sync_s": 0.25,
    }
    values = {"train/loss": 1.0 / number, "train/reward": 0.5}
    return TrackedStep(number, 1_000_000.0 + number, values, metrics)


def tracked(folder: Path) -> TrackedRun:
    return TrackedRun("unit", folder, RUN)


def write(section: Any, folder: Path, first: int = 1) -> str:
    check_trackers([section])
    tracker = make_tracker(section)
    where = tracker.start(tracked(folder))
    for number in range(first, first + STEPS):
        tracker.log(step_of(number))
    tracker.finish("finished")
    return where


def twice(section: Any, folder: Path) -> None:
    """A run, and its resume."""
    write(section, folder)
    write(section, folder, 1 + STEPS)


def test_tensorboard_reads_back_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    twice(TensorboardTracking(type="tensorboard"), tmp_path / "tb")
    reader = EventAccumulator(str(tmp_path / "tb"))
    reader.Reload()
    found = reader.Scalars("train/loss")
    assert [one.step for one in found] == [1, 2, 3, 4, 5, 6]
    assert found[1].value == pytest.approx(0.5)
    assert found[1].wall_time == 1_000_002.0


def in_a_process(folder: Path, first: int) -> None:
    """Write to W&B from a process of its own, as a run and its resume do."""
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from pathlib import Path; import test_real_trackers as tests\n"
        "section = tests.WandbTracking(type='wandb', mode='offline')\n"
        f"tests.write(section, Path({str(folder)!r}), {first})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def wandb_records(file: Path) -> Iterator[Any]:
    """The records of an offline file: W&B's own messages, in the framing of LevelDB's log.

    Its reader is inside `wandb sync`, which only uploads; a block has 32 KiB, a part of a record
    its CRC, its length and its place in the record.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = file.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", content, at)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


def test_wandb_reads_back_its_offline_files_and_a_resume_has_the_same_id(tmp_path: Path) -> None:
    in_a_process(tmp_path / "wandb", 1)
    in_a_process(tmp_path / "wandb", 1 + STEPS)
    files = sorted((tmp_path / "wandb").rglob("run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1
    losses, names = [], set()
    for record in (record for file in files for record in wandb_records(file)):
        if record.HasField("run"):
            names.add(record.run.display_name)
        losses += [
            float(item.value_json)
            for item in record.history.item
            if (item.key or item.nested_key[0]) == "train/loss"
        ]
    assert names == {"unit"}
    assert sorted(losses, reverse=True) == pytest.approx([1 / n for n in range(1, 7)])


def test_wandb_sync_knows_the_run(tmp_path: Path) -> None:
    write(WandbTracking(type="wandb", mode="offline"), tmp_path / "wandb")
    (run,) = (tmp_path / "wandb" / "wandb").glob("offline-run-*")
    command = [str(Path(sys.executable).with_name("wandb")), "sync", "--dry-run", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.name in done.stdout + done.stderr, done


def test_mlflow_reads_back_one_run_of_a_local_store(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    twice(MlflowTracking(type="mlflow"), tmp_path / "ml")
    uri = f"sqlite:///{tmp_path / 'ml' / 'mlflow.db'}"
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    experiment = client.get_experiment_by_name("composer-mesh")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(one.step, one.timestamp) for one in history][:2] == [
        (1, 1_000_001_000),
        (2, 1_000_002_000),
    ]
    assert len(history) == 2 * STEPS
    assert run.data.params["trainer.lr"] == "0.0003"
    assert run.info.status == "FINISHED"


def test_trackio_reads_back_one_run(tmp_path: Path) -> None:
    section = TrackioTracking(type="trackio", folder=tmp_path / "trackio", project="unit")
    twice(section, tmp_path / "own")
    from trackio.sqlite_storage import SQLiteStorage

    runs = SQLiteStorage.get_runs("unit")
    assert runs == ["unit"]
    logs = SQLiteStorage.get_logs("unit", "unit")
    assert [one["step"] for one in logs] == [1, 2, 3, 4, 5, 6]
    assert logs[1]["train/loss"] == pytest.approx(0.5)


def got(url: str, token: str = "") -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def test_prometheus_serves_the_last_values_to_whoever_has_the_token(tmp_path: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    os.environ["UNIT_TOKEN"] = "a-token-of-24-characters"
    tracker = make_tracker(PrometheusTracking(type="prometheus", port=0, token_env="UNIT_TOKEN"))
    url = tracker.start(tracked(tmp_path))
    tracker.log(step_of(1))
    tracker.log(step_of(4))
    with pytest.raises(urllib.error.HTTPError, match="401"):
        got(url)
    text = got(url, "a-token-of-24-characters")
    tracker.finish("finished")
    found = {one.name: one.samples[0] for one in text_string_to_metric_families(text)}
    assert found["composer_mesh_train_loss"].value == 0.25
    assert found["composer_mesh_step"].value == 4
    assert found["composer_mesh_train_loss"].labels == {"run": "unit"}


class _Collector(BaseHTTPRequestHandler):
    bodies: list[bytes] = []  # noqa: RUF012  shared with the test

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.bodies.append(self.rfile.read(length))
        self.send_response(200)
        self.end_headers()

    log_message: Callable[..., None] = lambda *_: None


def test_a_collector_gets_a_trace_of_each_step_with_its_parts(tmp_path: Path) -> None:
    import gzip

    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    server = HTTPServer(("127.0.0.1", 0), _Collector)
    Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    write(OpentelemetryTracking(type="opentelemetry", endpoint=url), tmp_path)
    server.shutdown()
    spans = []
    for body in _Collector.bodies:
        content = gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body
        for resource in ExportTraceServiceRequest.FromString(content).resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    steps = [span for span in spans if span.name.startswith("step ")]
    assert [span.name for span in steps] == ["step 1", "step 2", "step 3"]
    (train,) = [one for one in spans if one.name == "train" and one.trace_id == steps[0].trace_id]
    assert train.parent_span_id == steps[0].span_id
    assert train.end_time_unix_nano - train.start_time_unix_nano == 1_000_000_000
    assert steps[0].end_time_unix_nano - steps[0].start_time_unix_nano == 2_000_000_000
