"""Monarch's collector of telemetry, with its socket in a folder that we choose.

Monarch's own puts it below `/tmp` and is started with an HTTP server.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_distributed_telemetry import (
    _register_telemetry_schemas,
    _start_socket_ingest,
)
from monarch._rust_bindings.monarch_distributed_telemetry.database_scanner import DatabaseScanner
from monarch._rust_bindings.monarch_extension.snapshot_integration import (
    _pre_register_snapshot_schemas,
)
from monarch._src.job.telemetry_actor import TelemetryActor
from monarch.actor import context

START_S = 60.0


class Collector(TelemetryActor):
    """The tables of one run, fed from the Unix socket `ingest`."""

    def __init__(self, ingest: str, retention_s: int) -> None:
        super().__init__("", retention_s)
        self._scanner: DatabaseScanner | None = None
        self._ingest = ingest

    def _activate_impl(self) -> bool:
        """Make the tables and listen, once; `activate` calls it."""
        if self._scanner is None:
            scanner = DatabaseScanner(0, retention_secs=self._retention_secs)
            _register_telemetry_schemas(scanner)
            _pre_register_snapshot_schemas(scanner)
            _start_socket_ingest(scanner, self._ingest)
            self._scanner = scanner
        return True


def collect(ingest: Path, retention_s: int) -> Any:
    """Start the collector in this process; return its actor. Waits until it listens."""
    procs = context().actor_instance.proc_mesh
    collector = procs.spawn("telemetry", Collector, str(ingest), retention_s)
    collector.activate.call_one().get(timeout=START_S)
    return collector
