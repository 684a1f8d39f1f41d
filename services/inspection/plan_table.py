"""Prints a run's mesh as tables: its actors, channels and transports.

`planning.mesh_layout` computes them; `placement_table` shows where they run.
"""

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from composer_mesh.planning.mesh_layout import MeshPlan


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


def _state(on: bool) -> str:
    return "on" if on else "off, costs nothing"
