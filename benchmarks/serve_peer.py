"""Our training server and SkyRL's, side by side: the same SDK, model and calls.

    python benchmarks/serve_peer.py ENVIRONMENT [--quick] [--json FILE]

ENVIRONMENT has SkyRL 0.4.0's server and the SDK that it allows; `nox -s skyrl` makes it. Both
servers serve one tiny Qwen3 of random weights on the CPU, one at a time, twice in turns;
each figure is the better of two. `steps_per_s_over_skyrl` and `samples_per_s_over_skyrl` are our
rates over theirs, of one client, and with `_at_once` of 8 clients, and of 64 samples. What both
compile before is not in them; it is `ready_s`.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from report import Report, arguments
from serve import CLIENTS, free_port, serve_command, serving, settings_of, tail, write_policy

SAMPLES = 64
ROUNDS = 2
CLIENT = Path(__file__).with_name("serve_peer_client.py")
PROJECT = """[project]
name = "skyrl-on-cpu"
version = "0"
requires-python = ">=3.11"
[project.optional-dependencies]
tinker = []
jax = []
"""
"""SkyRL's server starts its engine by the `uv run` that it was started by, with these extras."""


def theirs(place: Path, base: Path, port: int, environment: Path) -> list[str]:
    project = place / "project"
    project.mkdir(exist_ok=True)
    (project / "pyproject.toml").write_text(PROJECT)
    uv = str(environment / "bin" / "uv")
    backend = {"max_lora_adapters": CLIENTS + 2, "max_lora_rank": 8}
    return [
        *(uv, "run", "--active", "--no-sync", "--project", str(project)),
        *("-m", "skyrl.tinker.api", "--host", "127.0.0.1", "--port", str(port)),
        *("--base-model", str(base), "--backend", "jax"),
        *("--backend-config", json.dumps(backend)),
        *("--checkpoints-base", str(place / f"checkpoints-{port}")),
        *("--database-url", f"sqlite:///{place}/skyrl-{port}.db"),
    ]


def measured(command: list[str], port: int, base: Path, environment: Path, quick: bool) -> dict:
    within = dict(os.environ) | {
        "VIRTUAL_ENV": str(environment),
        "JAX_PLATFORMS": "cpu",
        "TINKER_TELEMETRY": "0",
        "HF_HUB_OFFLINE": "1",
    }
    log = base.parent / f"server-{port}.log"
    with serving(command, port, log, within) as url:
        steps = "10" if quick else "30"
        script = [str(environment / "bin" / "python"), str(CLIENT), url, str(base), str(CLIENTS)]
        done = subprocess.run(
            [*script, steps, str(SAMPLES)],
            env=within,
            capture_output=True,
            text=True,
            timeout=1200,
        )
    if done.returncode:
        raise SystemExit(f"the client failed:\n{done.stderr[-3000:]}\nits server:\n{tail(log)}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("environment", type=Path)
    given = parser.parse_args()
    environment, report = given.environment.absolute(), Report("serve_peer")
    found: dict[str, list[dict]] = {"ours": [], "SkyRL's": []}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        base = place / "policy"
        write_policy(base)
        for _ in range(ROUNDS):
            for name, rates in found.items():
                port = free_port()
                command = (
                    serve_command(settings_of(base, str(base)), place / f"served-{port}", port)
                    if name == "ours"
                    else theirs(place, base, port, environment)
                )
                rates.append(measured(command, port, base, environment, given.quick))
    rows = []
    for figure in found["ours"][0]:
        best = min if figure == "ready_s" else max
        own, peer = (best(one[figure] for one in rates) for rates in found.values())
        report.figures |= {f"{figure} of ours": own, f"{figure} of SkyRL's": peer}
        report.ratios[f"{figure}_over_skyrl"] = own / peer
        rows.append((figure, f"{own:.3g}", f"{peer:.3g}", f"{own / peer:.2f}"))
    report.print_table("training servers", ("", "ours", "SkyRL's", "ratio"), rows)
    report.finish(given.json)


if __name__ == "__main__":
    main()
