"""Prints a run's placement: each process with its host, cores, GPUs and memory.

Prints a run's mesh as tables: its actors, channels and transports; and keys of its config.

`planning.mesh_layout` computes them; `placement_table` shows where they run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from composer_mesh.configs.errors import shown
from composer_mesh.planning.host_capacity import WHOLE, HostResources, Placed, busiest
from composer_mesh.planning.memory import SHARED_CODE, in_gb, total
from composer_mesh.planning.mesh_layout import MeshPlan
from composer_mesh.planning.placement_solver import Placement
from composer_mesh.services.pool.process_placement import ProcessPlacements


def print_plan(plan: MeshPlan, console: Console) -> None:
    """Print tables of the mesh's actors, channels and transports."""
    actors = Table("actor", "what it does", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for title in ("replicas", "processes", "threads each"):
        actors.add_column(title, justify="right")
    for row in plan.actors:
        counts = (str(row.replicas), str(row.processes), str(row.threads))
        actors.add_row(row.kind, row.role, *counts)
    actors.add_section()
    actors.add_row("total", f"{plan.threads} threads when all are busy", "", str(plan.processes))
    console.print(actors)
    console.print("channels", style="italic")
    for channel in plan.channels:
        console.print(f"  {channel.name}: weight {channel.weight:g}, {_state(channel.on)}")
    console.print("transports", style="italic")
    for transport in plan.transports:
        console.print(f"  {transport}", markup=False, highlight=False, soft_wrap=True)


def channels_line(plan: MeshPlan) -> str:
    """Return the channels of a run with their weights, and what is off."""
    states = (
        f"{one.name} {one.weight:g}" if one.on else f"{one.name} off" for one in plan.channels
    )
    return f"channels and their weights: {', '.join(states)}"


def print_tables(tables: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """Print one row per table of a config, with its keys and values as in TOML."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column()
    for path, table in tables.items():
        keys = (f"{name} = {shown(value)}" for name, value in table.items())
        grid.add_row(Text(f"  {path}"), Text(", ".join(keys)))
    console.print(grid)


def _state(on: bool) -> str:
    return "on" if on else "off, costs nothing"


WIDEST = 200
COLUMNS = ("host", "threads", "cores", "GPUs", "memory", "GPU memory")


def print_placement(placements: ProcessPlacements, console: Console) -> None:
    """Print one row per process, one per host with its totals, and notes on what the sums omit.

    Makes the console as wide as the table.
    """
    if placements.placement.placed:
        _print_table(placements.placement, console)
    for note in placements.notes:
        console.print(f"  {note}", markup=False, highlight=False, soft_wrap=True)


def _print_table(placement: Placement, console: Console) -> None:
    table = Table("process", *COLUMNS, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in table.columns[2:]:
        column.justify = "right"
    for column in table.columns:
        column.no_wrap = True
    gpu_memory = {host.name: host.gpu_memory for host in placement.hosts}
    for one in placement.placed:
        table.add_row(*_process(one, gpu_memory.get(one.host, 0)))
    table.add_section()
    for host in placement.hosts:
        table.add_row(*_host(host, placement.on(host.name)))
    # Truncated cells would hide the figures; a narrow terminal wraps the lines.
    wide = console.options.update(max_width=WIDEST)
    console.width = max(console.width, Measurement.get(console, wide, table).maximum)
    console.print("placement (memory in GB: estimated / available)", style="italic")
    console.print(table)


def _process(placed: Placed, gpu_memory: int) -> tuple[str, ...]:
    process = placed.process
    share = f" ({placed.gpu_share:g})" if placed.gpus and placed.gpu_share < 1 else ""
    gpu = f"{in_gb(placed.gpu_bytes)} / {in_gb(placed.gpu_share * gpu_memory)}"
    memory = in_gb(total(process.memory.host))
    given = "" if process.given is None else f" / {in_gb(process.given)}"
    return (
        process.name,
        placed.host,
        str(process.threads),
        ranges(placed.cores) if placed.process.cores else "shared",
        ranges(placed.gpus) + share if placed.gpus else "-",
        memory + given,
        gpu if placed.gpus else "-",
    )


def _host(host: HostResources, placed: Sequence[Placed]) -> tuple[str, ...]:
    own = sum(one.process.cores for one in placed)
    gpus = busiest((one.process, one.process.gpus) for one in placed) / WHOLE
    memory = SHARED_CODE + sum(one.process.host_bytes for one in placed)
    on_gpus = busiest((one.process, one.gpu_bytes * len(one.gpus)) for one in placed)
    return (
        "all",
        host.name,
        str(sum(one.process.threads for one in placed)),
        f"{own} / {host.cores}",
        f"{gpus:g} / {host.gpus}" if host.gpus else "-",
        f"{in_gb(memory)} / {in_gb(host.memory)}",
        f"{in_gb(on_gpus)} / {in_gb(host.gpus * host.gpu_memory)}" if host.gpus else "-",
    )


def ranges(numbers: Sequence[int]) -> str:
    """`0-3,6`, of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
