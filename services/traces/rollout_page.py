"""Rendering of one rollout: the prompt, each turn with its data, and the outcome.

Text of models, tools and teachers is quoted behind a bar, without markup and control codes, so that
it cannot imitate the page's own text.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.text import Text

from composer_mesh.rollouts.pairs import TeacherVote
from composer_mesh.rollouts.traces import ErrorSite, Message
from composer_mesh.services.inspection.page import plain_text
from composer_mesh.services.traces.list_page import MARKS, trained, versions
from composer_mesh.services.traces.listing import Acted, ListedRollout, Paired, acted
from composer_mesh.services.traces.text import (
    GUTTER,
    QuotedText,
    action_line,
    call_text,
    calls_of,
    content_of,
    plain_lines,
)

MOST_LINES = 40
"""Maximum lines of a text without --full."""
LONGEST = 2000
UNLIKELY = -2.0
"""Mean log-prob (nats) below which a turn is marked as unlikely."""
ROLES = {"user": "green", "system": "blue", "tool": "yellow", "policy": "cyan"}


@dataclass(frozen=True)
class RolloutPage:
    """The rollout page; `full` shows long texts completely."""

    rollout: ListedRollout
    full: bool = False

    def draw(self) -> RenderableType:
        """Render the page for any width."""
        conversation = acted(self.rollout.trace)
        parts: list[RenderableType] = [*self._head(), Text()]
        parts += [self._quoted(role_of(message), message) for message in conversation.opening]
        for turn in conversation.turns:
            parts += self._turn(turn)
        return Group(*parts, *self._end())

    def _head(self) -> Iterator[Text]:
        one, trace = self.rollout.listed, self.rollout.trace
        mark, style = MARKS[trace.success]
        yield Text.assemble(
            (plain_text(trace.trace_id), "bold cyan"),
            f"  {mark} reward {trace.reward:g}",
            style=f"bold {style}",
        )
        lived = versions(one.row.oldest_version, one.row.newest_version)
        yield Text(
            f"{plain_text(trace.task)} {trace.split} {trace.index} · group {trace.group_id}, "
            f"sample {trace.sample} · {trained(one)}",
        )
        yield Text(
            f"{_count(len(trace.turns), 'turn')} · {one.row.tokens:,} tokens sampled of "
            f"{one.row.length:,} · policy version {lived}",
        )
        if self.rollout.answer is not None:
            yield Text.assemble(("answer  ", "dim"), plain_text(self.rollout.answer, LONGEST))
        if len(self.rollout.group) > 1:
            yield self._siblings()
        for note in self.rollout.notes:
            yield Text(plain_text(note, LONGEST), style="yellow")

    def _siblings(self) -> Text:
        text = Text("group   ", style="dim")
        for trace in self.rollout.group:
            mark, style = MARKS[trace.success]
            here = trace.trace_id == self.rollout.trace.trace_id
            look = f"{style} reverse" if here else f"{style} not dim"
            text.append(f"{trace.sample}{mark}{trace.reward:.2f}", look).append("  ")
        text.rstrip()
        return text

    def _turn(self, turn: Acted) -> Iterator[RenderableType]:
        rollout = self.rollout
        sites = [site for site in rollout.trace.error_sites if site.turn == turn.number]
        yield _rule(f"turn {turn.number}", _measures(turn), "red" if sites else "cyan")
        if turn.message is None:
            yield Text("the conversation has no message of this turn", style="dim")
        else:
            yield self._quoted("policy", turn.message)
        for site in sites:
            yield QuotedText("error", _site(site), "red")
        for hint in (hint for hint in rollout.hints if hint.turn == turn.number):
            how = f"{hint.source}, {hint.wording}" if hint.wording else hint.source
            yield QuotedText("hint", self._text(hint.text), "magenta", how)
        for paired in (one for one in rollout.pairs if one.pair.turn == turn.number):
            yield _pair(paired)
        for message in turn.answers:
            yield self._quoted(role_of(message), message)

    def _quoted(self, label: str, message: Message) -> QuotedText:
        parts = [self._text(said)] if (said := content_of(message)) else []
        parts += [call_text(name, given, self._most) for name, given in calls_of(message)]
        text = Text("\n").join(parts or [Text("(empty)", style="dim")])
        return QuotedText(label, text, ROLES.get(label, "default"))

    def _text(self, text: str) -> Text:
        return Text("\n".join(plain_lines(text, self._most)))

    def _end(self) -> Iterator[RenderableType]:
        trace = self.rollout.trace
        mark, style = MARKS[trace.success]
        yield Rule(style="dim")
        yield Text(f"{mark} reward {trace.reward:g}", style=f"bold {style}")
        for late in self.rollout.rewards:
            source = f" from {plain_text(late.source)}" if late.source else ""
            taken = "" if late.step is None else f" in step {late.step + 1}"
            yield Text(
                f"late reward {late.reward:g}{source} · {late.state}{taken}", style="magenta"
            )
        if queries := queries_line(self.rollout):
            yield queries

    @property
    def _most(self) -> int | None:
        return None if self.full else MOST_LINES


def outcome_text(paired: Paired) -> str:
    """Format the outcome of a pair."""
    return paired.state if paired.step is None else f"{paired.state} in step {paired.step}"


def queries_line(rollout: ListedRollout) -> Text:
    """Format the outcomes of the teacher queries about the group; empty if there were none."""
    outcomes = rollout.teacher_queries.get("outcomes")
    if not isinstance(outcomes, dict) or not outcomes:
        return Text()
    counts = ", ".join(
        f"{count} {plain_text(str(name)).replace('_', ' ')}" for name, count in outcomes.items()
    )
    return Text(f"teachers about this group's states: {counts}", style="blue")


def _measures(turn: Acted) -> str:
    """Format token counts, versions and the mean log-prob of a turn."""
    said = turn.turn
    if not said.action_ids:
        return "nothing sampled"
    lived = versions(min(said.versions), max(said.versions))
    mean = sum(said.logprobs) / len(said.logprobs)
    parts = [
        f"{len(said.context_ids):,} + {_count(len(said.action_ids), 'token')}",
        f"version {lived}",
        f"log-prob {mean:.3f}" + (" (unlikely)" if mean < UNLIKELY else ""),
    ]
    if said.stop_reason == "length":
        parts.append("cut off at its longest")
    return " · ".join(parts)


def _rule(title: str, about: str, style: str) -> Rule:
    text = Text.assemble((title, f"bold {style}"), (f"  {about}" if about else "", "dim"))
    return Rule(text, align="left", style="dim")


def role_of(message: Message) -> str:
    """Return the speaker's label, short enough for the gutter."""
    role = plain_text(str(message.get("role")))
    return {"assistant": "model", "developer": "system"}.get(role, role[:GUTTER])


def _pair(paired: Paired) -> QuotedText:
    """Render the teachers' preferred action, then each teacher's vote."""
    pair = paired.pair
    text = Text(action_line(pair.chosen_text, LONGEST), style="bold")
    for voice in pair.provenance.voices:
        text.append("\n").append(_voice(voice))
    remark = (
        f"{len(pair.teachers)} of {pair.votes} votes, {pair.asked} queried · "
        f"${pair.usd:.4f}{'' if pair.usd_known else ' at least'} · {outcome_text(paired)}"
    )
    return QuotedText("teachers", text, "blue", remark)


def _site(site: ErrorSite) -> Text:
    text = Text(plain_text(site.error_kind), style="bold red")
    for name, value in site.data.items():
        text.append(f"  {plain_text(name)}: ", "not bold dim")
        text.append(plain_text(value, LONGEST), "not bold")
    return text


def _voice(voice: TeacherVote) -> Text:
    side = "with the majority" if voice.with_majority else "against it"
    if voice.failure is not None or voice.kind == "failed":
        side = f"failed: {voice.failure or 'unknown'}"
    elif voice.kind == "undecided":
        side = "undecided"
    text = Text.assemble((plain_text(voice.teacher), "blue"), (f"  {side}", "dim"))
    if voice.with_student:
        text.append(", as the student", "dim")
    if voice.action:
        text.append(f"  {plain_text(voice.action, 200)}")
    return text.append(f"  {'cached' if voice.cached else f'${voice.usd:.4f}'}", "dim")


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
