"""What a container without a daemon costs, and what the endpoint of a harness adds to a turn.

    python benchmarks/harbor.py [--part containers | endpoint] [--quick] --json harbor.json

The image is this interpreter, its standard library and some thirty programs. `unpack_to_tar` is
the first use of the image (verified, unpacked, started, one command run) in relation to `tar -x`
of the same layer. `command_to_bare` is a command in a container in relation to the same as a bare
process, `start_to_bwrap` a start with its first command to bubblewrap alone on the same folder, and
`snapshot_to_cp` a snapshot of 1,000 changed files to `cp -a` of them. Medians, in turns.

`turn_to_port_...` are turns through the endpoint in relation to their requests at the generation
port, for each protocol, streamed or whole, by the number of episodes at once and the length of the
context (`harbor_endpoint.py`). `--quick` has those of one episode that are streamed.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median

import psutil
from harbor_endpoint import LONG, measured_turns
from report import Report, arguments

from composer_mesh.mesh.private_folder import entered_folder
from composer_mesh.mesh.sandboxes.launchers import find_launcher
from composer_mesh.mesh.sandboxes.root import build_root
from composer_mesh.plugins.harbor.containers.boxes import BoxContainers
from composer_mesh.plugins.harbor.containers.opening import open_boxes
from composer_mesh.plugins.harbor.containers.port import (
    Container,
    ContainerSettings,
    ImageSource,
)
from composer_mesh.plugins.harbor.images.manifest import MACHINES

COMMAND = ["sh", "-c", "true"]
CHANGED_FILES, CHANGED_BYTES = 1_000, 10_000


def image_file(folder: Path) -> tuple[Path, Path]:
    """Write an image as `docker save` does; return it, and its only layer."""
    root = build_root(folder / "made", (), ())
    layer = folder / "layer.tar"
    with tarfile.open(layer, "w") as archive:
        archive.add(root, ".")
    digest = f"sha256:{hashlib.sha256(layer.read_bytes()).hexdigest()}"
    machine = os.uname().machine
    config = {
        "architecture": MACHINES.get(machine, machine),
        "os": "linux",
        "rootfs": {"type": "layers", "diff_ids": [digest]},
        "config": {"WorkingDir": "/w"},
    }
    entry = {"Config": "config.json", "RepoTags": ["python:local"], "Layers": ["layer.tar"]}
    saved = folder / "image.tar"
    with tarfile.open(saved, "w") as archive:
        archive.add(layer, "layer.tar")
        for name, found in (("config.json", config), ("manifest.json", [entry])):
            content = json.dumps(found).encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return saved, layer


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Return the seconds that some work takes."""
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


async def first_command(containers: BoxContainers, settings: ContainerSettings) -> None:
    """Start a container, run a command in it, end it."""
    container = await containers.start(settings)
    done = await container.run(COMMAND)
    assert done.exit_code == 0, done
    await container.close()


async def bare(*command: str) -> None:
    """Run a program of this machine."""
    nowhere = subprocess.DEVNULL
    await asyncio.to_thread(subprocess.run, command, check=True, stdout=nowhere, stderr=nowhere)


def bwrap_command(root: Path) -> list[str]:
    """Return how bubblewrap alone runs the command on a folder."""
    launcher = find_launcher("bubblewrap")
    loader = [] if launcher.libraries is None else ["env", f"LD_LIBRARY_PATH={launcher.libraries}"]
    mounts = ["--unshare-all", "--ro-bind", str(root), "/", "--proc", "/proc", "--dev", "/dev"]
    return [*loader, str(launcher.binary), *mounts, "--", *COMMAND]


async def side_by_side(
    containers: BoxContainers, settings: ContainerSettings, count: int
) -> dict[str, float]:
    """Start many containers; return seconds, and memory of all their processes and of the host."""
    before = psutil.virtual_memory().available
    made: list[Container] = []

    async def start_one() -> None:
        container = await containers.start(settings)
        made.append(container)
        assert (await container.run(COMMAND)).exit_code == 0

    began = time.perf_counter()
    await asyncio.gather(*(start_one() for _ in range(count)))
    seconds = time.perf_counter() - began
    keeper = psutil.Process(containers.keeper)
    pss = [one.memory_full_info().pss for one in (keeper, *keeper.children(recursive=True))]
    used = before - psutil.virtual_memory().available
    await asyncio.gather(*(one.close() for one in made))
    return {
        "side_by_side_s": seconds,
        "box_kib": sum(pss) / count / 1024,
        "box_host_kib": max(0.0, used / count / 1024),
    }


async def snapshots(
    containers: BoxContainers, settings: ContainerSettings, folder: Path, rounds: int
) -> tuple[float, float]:
    """Return the medians of a snapshot of changed files, and of `cp -a` of as many."""
    container = await containers.start(settings)
    files = {f"{place // 100}/{place}": bytes(CHANGED_BYTES) for place in range(CHANGED_FILES)}
    await container.put(files, "/changed")
    for path, content in files.items():
        (folder / "peer" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "peer" / path).write_bytes(content)
    ours, peer = [], []
    for turn in range(rounds):
        began = time.perf_counter()
        snapshot = await container.snapshot()
        ours.append(time.perf_counter() - began)
        peer.append(
            await timed(lambda turn=turn: bare("cp", "-a", f"{folder}/peer", f"{folder}/p{turn}"))  # type: ignore[misc]
        )
        await snapshot.remove()
    await container.close()
    return median(ours), median(peer)


async def measured(
    containers: BoxContainers, folder: Path, boxes: int, rounds: int
) -> dict[str, float]:
    """Return all figures."""
    saved, layer = image_file(folder)
    settings = ContainerSettings(ImageSource(f"docker-archive:{saved}"))
    found = {"cold_s": await timed(lambda: first_command(containers, settings))}
    (folder / "untarred").mkdir()
    found["tar_s"] = await timed(lambda: bare("tar", "-xf", str(layer), "-C", f"{folder}/untarred"))
    times: dict[str, list[float]] = {name: [] for name in ("start", "bwrap", "command", "bare")}
    container = await containers.start(settings)
    for _ in range(rounds):
        times["start"].append(await timed(lambda: first_command(containers, settings)))
        times["bwrap"].append(await timed(lambda: bare(*bwrap_command(folder / "made"))))
        times["command"].append(await timed(lambda: container.run(COMMAND)))
        times["bare"].append(await timed(lambda: bare(*COMMAND)))
    await container.close()
    found |= {f"{name}_ms": median(seconds) * 1000 for name, seconds in times.items()}
    found |= await side_by_side(containers, settings, boxes)
    found["snapshot_s"], found["cp_s"] = await snapshots(containers, settings, folder, rounds)
    return found


def containers_part(report: Report, quick: bool) -> None:
    """Measure containers."""
    boxes = 50 if quick else 200
    folder = entered_folder()
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        Path(inner).chmod(0o755)
        containers = open_boxes(cache=Path(inner) / "cache", most=boxes)

        async def all_of_it() -> dict[str, float]:
            try:
                return await measured(containers, Path(inner), boxes, 5 if quick else 20)
            finally:
                await containers.close()

        found = asyncio.run(all_of_it())
    rows = [
        ("first command, image not unpacked yet", f"{found['cold_s']:.2f} s"),
        ("tar -x of its layer", f"{found['tar_s']:.2f} s"),
        ("first command, image unpacked, and the container's end", f"{found['start_ms']:.1f} ms"),
        ("the same by bubblewrap alone", f"{found['bwrap_ms']:.1f} ms"),
        ("a command in a container", f"{found['command_ms']:.1f} ms"),
        ("the same as a bare process", f"{found['bare_ms']:.1f} ms"),
        (f"{boxes} containers at once, each with a command", f"{found['side_by_side_s']:.1f} s"),
        ("memory of a container's processes", f"{found['box_kib']:.0f} KiB"),
        ("memory of the host less, for each container", f"{found['box_host_kib']:.0f} KiB"),
        ("snapshot of 1,000 changed files", f"{found['snapshot_s'] * 1000:.0f} ms"),
        ("cp -a of as many", f"{found['cp_s'] * 1000:.0f} ms"),
    ]
    report.print_table("Containers of bubblewrap", ("", ""), rows)
    layer = "overlay" if containers.overlays else "copy"
    report.figures |= {**found, "boxes": boxes, "layer": layer}
    report.ratios |= {
        "unpack_to_tar": found["cold_s"] / found["tar_s"],
        "start_to_bwrap": found["start_ms"] / found["bwrap_ms"],
        "command_to_bare": found["command_ms"] / found["bare_ms"],
        "snapshot_to_cp": found["snapshot_s"] / found["cp_s"],
    }


def endpoint_part(report: Report, quick: bool) -> None:
    """Measure turns at the endpoint and at the generation port."""
    found = asyncio.run(measured_turns(quick))
    rows = []
    for name, one in found.items():
        ratio = one["turn_ms"] / (one["turn_ms"] - one["added_ms"])
        report.ratios[f"turn_to_port_{name}"] = ratio
        report.figures |= {f"{key}_{name}": value for key, value in one.items()}
        shown = [f"{one[key]:.1f} ms" for key in ("added_ms", "turn_ms", "port_ms")]
        rows.append((name.replace("_", " "), *shown, f"{ratio:.2f}"))
    columns = ("turns", "added", "at the endpoint", "sent directly", "ratio")
    report.print_table(f"Turns of {LONG:,} tokens (long) and of few", columns, rows)


PARTS = {"containers": containers_part, "endpoint": endpoint_part}


def main() -> int:
    parser = arguments(__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=PARTS, help="measure this alone")
    options = parser.parse_args()
    report = Report("harbor")
    for part in [options.part] if options.part else PARTS:
        PARTS[part](report, options.quick)
    report.finish(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
