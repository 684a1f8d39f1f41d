"""Rendering of the rollout list for a given width.

    80 columns    id, reward, turns, tokens, versions, errors
    140 and more  also the actions turn by turn, with a mark after each error

In group order each prompt has its own heading. Text of models and tools is never interpreted as
markup or control codes.

Columns of the rollout list: their contents and which of them fit a width.

A cell is limited to its column's width and omits the least important parts first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.store.rows import GroupState
from composer_mesh.services.traces.listing import Acted, Listed, Listing, RolloutTotals, acted
from composer_mesh.services.traces.text import content_of, message_line, one_line

WIDE = 140
GAP = 2
MOST_ERRORS = 36
"""Maximum width of the error column on a wide page."""
LONGEST_CALL = 60
LONGEST_WORDS = 80
SHORT = 14
"""Characters of an action that are shown when space is short."""
LEFT_OUT = "…"
MARKS = {True: ("✓", "green"), False: ("✗", "red")}
STATES = {
    GroupState.IN_FLIGHT: "in flight",
    GroupState.FINISHED: "not trained",
    GroupState.DAMAGED: "damaged",
}

Cell = Callable[[Listed, Trace | None, int], Text]


@dataclass(frozen=True)
class ListColumn:
    """A column; `width` is set once it is known."""

    title: str
    cell: Cell
    right: bool = False
    width: int = 0


def columns_for(rows: Sequence[Listed], width: int, grouped: bool) -> list[ListColumn]:
    """Return the columns of a page, as wide as the rows need; all parts of a page share them."""
    wide = width >= WIDE
    fixed = [ROLLOUT, REWARD]
    if any(one.late for one in rows):
        fixed.append(LATE)
    fixed += [TURNS, TOKENS, *([LENGTH] if wide else []), VERSION, *([] if grouped else [STEP])]
    sized = [replace(column, width=_natural(column, rows)) for column in fixed]
    rest = max(1, width - sum(column.width + GAP for column in sized))
    if not wide:
        return [*sized, replace(ERRORS, width=rest)]
    errors = min(_natural(ERRORS, rows), MOST_ERRORS)
    return [*sized, replace(ERRORS, width=errors), replace(PATH, width=rest - errors - GAP)]


def _natural(column: ListColumn, rows: Sequence[Listed]) -> int:
    return max(len(column.title), *(column.cell(one, None, MOST_ERRORS).cell_len for one in rows))


def trained(one: Listed) -> str:
    """Return the outcome of a rollout: the step that trained it, or its state."""
    known = STATES.get(one.row.state)
    if known is not None:
        return known
    return "trained" if one.step is None else f"step {one.step}"


def versions(oldest: int | None, newest: int | None) -> str:
    """Format the policy versions of a rollout: one, or the first and the last of several."""
    if oldest is None or newest is None:
        return "-"
    return str(oldest) if oldest == newest else f"{oldest}–{newest}"


def path_of(trace: Trace, width: int) -> Text:
    """Format a rollout turn by turn, with a mark after each action that failed.

    If the text is too long, all actions but the last are shortened, then the middle ones omitted.
    """
    failed = {site.turn for site in trace.error_sites}
    steps = [(_action(turn), turn.number in failed) for turn in acted(trace).turns]
    middle = range(1, len(steps) - 1)
    by_length = sorted(middle, key=lambda place: -cell_len(steps[place][0]))
    for place in [*by_length, *range(min(1, len(steps) - 1))]:
        if _drawn(steps).cell_len <= width:
            break
        steps[place] = (_shortened(steps[place][0]), steps[place][1])
    for kept in reversed(middle):
        if _drawn(steps).cell_len <= width:
            break
        steps[kept:-1] = [(LEFT_OUT, False)]
    return _drawn(steps)


def _drawn(steps: Sequence[tuple[str, bool]]) -> Text:
    parts = [
        Text.assemble((said, "red"), (" ✗", "bold red")) if failed else Text(said)
        for said, failed in steps
    ]
    return Text(" → ", style="dim").join(parts)


def _action(turn: Acted) -> str:
    if turn.message is None:
        return "?"
    if turn.message.get("tool_calls"):
        return message_line(turn.message, LONGEST_CALL)
    return f"“{one_line(content_of(turn.message), LONGEST_WORDS)}”"


def _shortened(action: str) -> str:
    """Return the name of a call, or the first words of other actions."""
    if action.startswith("“"):
        return action if len(action) <= SHORT else f"{action[:SHORT]}…”"
    name, bracket, _ = action.partition("(")
    return f"{name}(…)" if bracket else action


def _reward(one: Listed, _: Trace | None, __: int) -> Text:
    mark, style = MARKS[one.row.success]
    return Text.assemble((mark, f"bold {style}"), (f" {one.row.reward:.2f}", style))


def _late(one: Listed, _: Trace | None, __: int) -> Text:
    return Text("" if one.late is None else f"{one.late.reward:.2f}", style="magenta")


def _errors(one: Listed, _: Trace | None, width: int) -> Text:
    """List as many error kinds as fit, and the number of omitted ones."""
    counts = {kind: one.row.error_kinds.count(kind) for kind in dict.fromkeys(one.row.error_kinds)}
    named = [plain_text(kind) + (f"×{n}" if n > 1 else "") for kind, n in counts.items()]
    shown = list(named)
    while len(shown) > 1 and len(_listed(shown, len(named))) > width:
        shown.pop()
    return Text(_listed(shown, len(named)), style="red")


def _listed(shown: Sequence[str], total: int) -> str:
    more = f" +{total - len(shown)}" if len(shown) < total else ""
    return ", ".join(shown) + more


def _plain(value: Callable[[Listed], object]) -> Cell:
    return lambda one, _, __: Text(str(value(one)))


ROLLOUT = ListColumn("rollout", lambda one, _, __: Text(plain_text(one.row.trace_id), style="cyan"))
REWARD = ListColumn("reward", _reward)
LATE = ListColumn("late", _late, right=True)
TURNS = ListColumn("turns", _plain(lambda one: one.row.turns), right=True)
TOKENS = ListColumn("tokens", _plain(lambda one: f"{one.row.tokens:,}"), right=True)
LENGTH = ListColumn("length", _plain(lambda one: f"{one.row.length:,}"), right=True)
VERSION = ListColumn(
    "version",
    _plain(lambda one: versions(one.row.oldest_version, one.row.newest_version)),
    right=True,
)
STEP = ListColumn("step", _plain(lambda one: one.step or "-"), right=True)
ERRORS = ListColumn("errors", _errors)
PATH = ListColumn(
    "what it did",
    lambda _, trace, width: Text() if trace is None else path_of(trace, width),
)


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

    def _table(self, rows: Sequence[Listed], columns: Sequence[ListColumn], header: bool) -> Table:
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
    questions = [content_of(message) for message in before if message.get("role") == "user"]
    return one_line(questions[-1], LONGEST_QUESTION) if questions else ""


def tally_line(tally: RolloutTotals, shown: int) -> Text:
    """Format the number of matching rollouts, their mean reward and their success rate."""
    count = f"{shown:,} of {tally.count:,}" if shown < tally.count else f"{tally.count:,}"
    return Text.assemble(
        (f"{count} rollout{'s' * (tally.count != 1)}", "bold"),
        f" · mean reward {tally.mean_reward:.3f} · {tally.success:.1%} succeed",
    )


def errors_line(tally: RolloutTotals) -> Text:
    """Format the most frequent kinds of error sites; empty if there are none."""
    kinds = list(tally.errors.items())
    named = [f"{plain_text(kind)} {count:,}" for kind, count in kinds[:ERROR_KINDS_SHOWN]]
    if len(kinds) > ERROR_KINDS_SHOWN:
        named.append(f"{len(kinds) - ERROR_KINDS_SHOWN} kinds more")
    return Text.assemble(("errors: ", "dim"), (", ".join(named), "red")) if named else Text()
