"""Rendering of the rollout list for a given width.

    80 columns    id, reward, turns, tokens, versions, errors
    140 and more  also the actions turn by turn, with a mark after each error

In group order each prompt has its own heading. Text of models and tools is never interpreted as
markup or control codes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.traces.columns import Column, columns_for, trained
from composer_mesh.services.traces.listing import Listed, Listing, Tally
from composer_mesh.services.traces.text import content_of, one_line
from composer_mesh.services.traces.turns import acted

LONGEST_QUESTION = 400
ERROR_KINDS_SHOWN = 6


@dataclass(frozen=True)
class ListPage:
    """A list to render. `traces` maps ids to readable rollouts, `damage` groups to errors."""

    listing: Listing
    traces: Mapping[str, Trace] = field(default_factory=dict)
    damage: Mapping[int, str] = field(default_factory=dict)
    grouped: bool = True
    more: str = ""
    """What to type to see the omitted rollouts."""

    def draw(self, width: int) -> RenderableType:
        """Render the page; text that is too long for its column is truncated."""
        rows = self.listing.shown
        if not rows:
            return Text("no rollout fits", style="dim")
        columns = columns_for(rows, width, self.grouped)
        parts: list[RenderableType] = []
        for place, (heading, together) in enumerate(self._parts(rows)):
            if heading is not None:
                parts += [Text(), heading] if place else [heading]
            parts.append(self._table(together, columns, header=place == 0))
        return Group(*parts, Text(), *self._footer())

    def _parts(
        self, rows: Sequence[Listed]
    ) -> Iterator[tuple[RenderableType | None, list[Listed]]]:
        if not self.grouped:
            yield None, list(rows)
            return
        for _, together in groupby(rows, key=lambda one: one.row.group_id):
            members = list(together)
            yield self._heading(members[0]), members

    def _heading(self, first: Listed) -> Table:
        row = first.row
        left = Text.assemble((f"group {row.group_id}", "bold"), "  ")
        trace = self.traces.get(row.trace_id)
        if (why := self.damage.get(row.group_id)) is not None:
            left.append(plain_text(why), "bold red")
        elif trace is not None:
            left.append(question(trace))
        episode = f"{plain_text(row.task)} {row.split} {row.index}"
        line = Table.grid(expand=True, padding=(0, 2, 0, 0))
        line.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        line.add_column(no_wrap=True, justify="right", style="dim")
        line.add_row(left, Text(f"{episode} · {trained(first)}"))
        return line

    def _table(self, rows: Sequence[Listed], columns: Sequence[Column], header: bool) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=header)
        table.header_style = "dim"
        for column in columns:
            table.add_column(
                column.title,
                width=column.width,
                justify="right" if column.right else "left",
                no_wrap=True,
                overflow="ellipsis",
            )
        for one in rows:
            trace = self.traces.get(one.row.trace_id)
            table.add_row(*(column.cell(one, trace, column.width) for column in columns))
        return table

    def _footer(self) -> Iterator[Text]:
        yield tally_line(self.listing.tally, len(self.listing.shown))
        if errors := errors_line(self.listing.tally):
            yield errors
        if self.more:
            yield Text(self.more, style="dim")


def question(trace: Trace) -> str:
    """Return the last user message before the policy's first action, on one line."""
    before = acted(trace).opening
    asked = [content_of(message) for message in before if message.get("role") == "user"]
    return one_line(asked[-1], LONGEST_QUESTION) if asked else ""


def tally_line(tally: Tally, shown: int) -> Text:
    """Format the number of matching rollouts, their mean reward and their success rate."""
    count = f"{shown:,} of {tally.count:,}" if shown < tally.count else f"{tally.count:,}"
    return Text.assemble(
        (f"{count} rollout{'s' * (tally.count != 1)}", "bold"),
        f" · mean reward {tally.mean_reward:.3f} · {tally.success:.1%} succeed",
    )


def errors_line(tally: Tally) -> Text:
    """Format the most frequent kinds of error sites; empty if there are none."""
    kinds = list(tally.errors.items())
    named = [f"{plain_text(kind)} {count:,}" for kind, count in kinds[:ERROR_KINDS_SHOWN]]
    if len(kinds) > ERROR_KINDS_SHOWN:
        named.append(f"{len(kinds) - ERROR_KINDS_SHOWN} kinds more")
    return Text.assemble(("errors: ", "dim"), (", ".join(named), "red")) if named else Text()
