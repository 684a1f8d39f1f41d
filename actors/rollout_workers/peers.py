"""The actors that a rollout worker or an environment calls, as the controller names them.

    PooledGeneration      requests to generators, each as it arrives
    LockstepGeneration    requests to generators in rounds, which the controller releases
    PeerEnvironments      sessions: each is placed on the least busy environment and is lost with it
    PeerJudges            questions of an environment to judge actors

Which actors there are is said by the controller, whenever they change. Keys and money are theirs.

Which generator takes a request of `PooledGeneration`: the one that holds its prefix, unless it is
far busier.

    first request of a group      the least busy generator, which becomes the group's
    later ones of the group       the group's generator: its samples share the prompt
    later ones of an episode      the generator of its previous turn

A generator counts as far busier than the least busy one with more than `FACTOR` times its requests
and `SLACK` more: the request then goes to the least busy one, and so do those that follow. A
request whose generator died is sent to another one with the same seed, and so is one that failed,
once: a second equal error is raised.

In lockstep all episodes of a run take their turns together, so the batches that generators compute,
and with them every bit of the run, are the same however many rollout workers there are. The
controller decides from the names of the waiting requests which generator takes which of them; the
requests themselves go to the generators directly.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from composer_mesh.mesh.call_stream import Calls
from composer_mesh.mesh.failures import error_key
from composer_mesh.mesh.supervision import ActorDied, DeadlineExceeded, SessionLost
from composer_mesh.mesh.waiting import BackgroundTasks, cancel_and_wait, reported_to_loop
from composer_mesh.rollouts.episode import EpisodeRecord
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.pairs import TeacherReply
from composer_mesh.rollouts.tasks import Episode, FinishedRollout, GroupScore, Outcome, StepResult
from composer_mesh.rollouts.traces import Message, Turn
from composer_mesh.tasks.errors import JudgeFailed
from composer_mesh.tasks.judges import JudgeQuestion, JudgeReply, reply_of

FACTOR = 2
SLACK = 16


class StickyRouting:
    """The generators of the groups and episodes that are played."""

    def __init__(self, load: Callable[[str], int]) -> None:
        """`load` returns the requests that a generator has not answered."""
        self._load = load
        self._groups: dict[str, str] = {}
        self._episodes: dict[str, str] = {}
        self._members: Counter[str] = Counter()

    def begin(self, group: str) -> None:
        """Count an attempt at a sample of a group."""
        self._members[group] += 1

    def end(self, group: str, episode: str) -> None:
        """Forget an episode, and its group with the last one."""
        self._episodes.pop(episode, None)
        self._members[group] -= 1
        if self._members[group] <= 0:
            del self._members[group]
            self._groups.pop(group, None)

    def take(self, group: str, episode: str, generators: Sequence[str]) -> str:
        """Return the generator for the next request of an episode, one of those given."""
        least = min(generators, key=self._load)
        home = self._episodes.get(episode) or self._groups.get(group)
        bound = FACTOR * self._load(least) + SLACK
        if home is None or home not in generators or self._load(home) > bound:
            home = least
            self._groups[group] = home
        self._episodes[episode] = home
        return home


@dataclass(frozen=True)
class Peer:
    """One actor that serves; while it is not `open` it takes nothing new."""

    name: str
    ref: Any = field(repr=False)
    open: bool = True


@dataclass(frozen=True)
class Neighbours:
    """All actors that a rollout worker may call, and why others are gone, by their names."""

    generators: tuple[Peer, ...]
    environments: tuple[Peer, ...]
    gone: Mapping[str, str]


OpenStream = Callable[[str, Any], Calls]
"""Opens the calls to an actor, given its name and reference."""


class Peers:
    """The call streams to the actors of one kind."""

    def __init__(self, open_stream: OpenStream) -> None:
        self._open_stream = open_stream
        self._calls: dict[str, Calls] = {}
        self._gone: dict[str, str] = {}
        self._closing = BackgroundTasks(reported_to_loop)
        self._changed = asyncio.Event()
        self.open: list[str] = []
        """Names of those that take new work."""

    def update(self, peers: tuple[Peer, ...], gone: Mapping[str, str]) -> None:
        """Connect to new ones; end the calls to those that are gone."""
        for peer in peers:
            if peer.name not in self._calls:
                self._calls[peer.name] = self._open_stream(peer.name, peer.ref)
        for name in self._calls.keys() - {peer.name for peer in peers}:
            reason = self._gone[name] = gone.get(name, "it was stopped")
            calls = self._calls.pop(name)
            calls.lose(ActorDied(name, reason))
            self._closing.start(f"closing the calls to {name}", calls.close())
        self.open = [peer.name for peer in peers if peer.open]
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def load(self, name: str) -> int:
        """Return the calls that an actor has not answered, as far as it is known here."""
        return self._calls[name].load

    def died(self, name: str) -> ActorDied:
        """Return the reason why an actor is gone."""
        return ActorDied(name, self._gone.get(name, "it was stopped"))

    async def call(self, name: str, endpoint: str, /, *args: Any) -> Any:
        """Call an endpoint of one actor. Waits for its answer; raises `ActorDied`."""
        if name not in self._calls:
            raise self.died(name)
        return await self._calls[name].call(endpoint, *args)

    def __contains__(self, name: str) -> bool:
        return name in self._calls

    async def some_open(self) -> list[str]:
        """Return the names of those that take new work. Waits until there is one."""
        while not self.open:
            await self._changed.wait()
        return self.open

    def lose(self, died: ActorDied) -> None:
        """End all calls, and each later one, with a death."""
        for calls in self._calls.values():
            calls.lose(died)

    async def close(self) -> None:
        """Disconnect from all."""
        await asyncio.gather(*(calls.close() for calls in self._calls.values()))
        await self._closing.wait()


class PooledGeneration:
    """The port `Generation` over all generators; `attempts` is how often a request is sent."""

    def __init__(self, generators: Peers, attempts: int) -> None:
        self._generators, self._attempts = generators, attempts
        self.routing = StickyRouting(generators.load)

    async def generate(self, request: GenerationRequest, group: str) -> GenerationResult:
        """Sample one continuation. Waits for a generator, and for its last token."""
        episode = request.request_id.rpartition("-")[0]
        tried: set[str] = set()
        raised = ""
        for attempt in range(1, self._attempts + 1):
            names = await self._generators.some_open()
            fresh = [name for name in names if name not in tried]
            name = self.routing.take(group, episode, fresh or names)
            tried.add(name)
            try:
                return await self._generators.call(name, "generate", request)
            except Exception as error:  # supervision boundary: another generator may do it
                if attempt == self._attempts or error_key(error) == raised:
                    raise
                raised = error_key(error)
        raise AssertionError("a request is sent at least once")


MOST_FAILED = 10_000
"""Samples of which it is known where their last attempt failed; the oldest are forgotten."""


def sample_of(session_id: str) -> str:
    """Return the name of a session without the number of its attempt."""
    return session_id.partition(".")[0]


class PeerEnvironments:
    """The port `Environments` over all environment actors.

    A call has `deadline_s`, and again as long while its actor's task waits for another service.
    """

    def __init__(self, environments: Peers, deadline_s: float) -> None:
        self._environments, self._deadline_s = environments, deadline_s
        self._homes: dict[str, str] = {}
        self._sessions: Counter[str] = Counter()
        self._failed: dict[str, str] = {}
        self._notifying = BackgroundTasks(reported_to_loop)

    async def prepare(self, episode: Episode) -> tuple[Episode, str | None]:
        """Return an episode with its row, and its verified answer if the task states one."""
        return await self._anywhere("prepare", episode)

    async def score(self, episode: Episode, messages: list[Message]) -> Outcome:
        """Score a conversation that was had without a session."""
        return await self._anywhere("score", episode, messages)

    async def score_group(self, episode: Episode, group: list[FinishedRollout]) -> GroupScore:
        """Score the samples of an episode together."""
        return await self._anywhere("score_group", episode, group)

    async def begin(self, session_id: str, episode: Episode, agent: bytes = b"") -> list[Message]:
        """Open a session, or continue one that was adopted, by the row of this episode.

        Waits for an actor, including one that is still starting. An attempt after one that failed
        is made on another actor, if there is one. With the keys of an `agent`, another worker can
        continue from the answers that are recorded.
        """
        if session_id not in self._homes:
            self._enter(session_id, await self._home_of_new(session_id))
        return await self._call(session_id, "begin", episode, agent)

    async def adopt(self, session_id: str, home: str) -> EpisodeRecord | None:
        """Continue a session of a dead worker; None if its actor is gone, or has it no more."""
        if home not in self._environments:
            return None
        self._enter(session_id, home)
        record: EpisodeRecord | None = await self._call(session_id, "adopt")
        if record is None:
            self._leave(session_id)
        return record

    async def step(
        self, session_id: str, text: str, turn: Turn | None = None, again: bool = False
    ) -> StepResult:
        """Take an action; raises `SessionLost` where the session's actor is gone.

        The actor records a turn that is given. `again` waits for the last action instead, if there
        was one.
        """
        recorded = b"" if turn is None else pickle.dumps(turn)
        return await self._call(session_id, "step", text, recorded, again)

    async def record(self, session_id: str, answer: bytes) -> None:
        """Record an answer to the agent of a session, for another worker. Waits for its actor."""
        await self._call(session_id, "record", answer)

    def sent(self, session_id: str, answer: str, received: bool) -> None:
        """Record in the background whether the agent of an open session has got an answer."""
        if session_id in self._homes:
            self._notify(self._homes[session_id], "sent", session_id, answer, received)

    async def finish(self, session_id: str) -> Outcome:
        """End a session; return its conversation and how it was scored."""
        outcome: Outcome = await self._call(session_id, "finish")
        self._leave(session_id)
        self._failed.pop(sample_of(session_id), None)
        return outcome

    def abandon(self, session_id: str) -> None:
        """Drop a failed session; notify its actor in the background, if it is still serving."""
        home = self._leave(session_id)
        if home is None:
            return
        self._failed[sample_of(session_id)] = home
        if len(self._failed) > MOST_FAILED:
            del self._failed[next(iter(self._failed))]
        self._notify(home, "forget", session_id)

    async def close(self) -> None:
        """Stop notifying actors in the background."""
        await self._notifying.close()

    async def _call(self, session_id: str, endpoint: str, *args: Any) -> Any:
        home = self._homes[session_id]
        if home not in self._environments:
            died = self._environments.died(home)
            raise SessionLost(session_id, home, died.reason)
        try:
            return await self._within_deadline(home, endpoint, session_id, *args)
        except ActorDied as died:
            raise SessionLost(session_id, home, died.reason, True) from died

    async def _anywhere(self, endpoint: str, *args: Any) -> Any:
        """Call the least busy actor; raises `ActorDied` where it dies of it."""
        home = min(await self._environments.some_open(), key=self._environments.load)
        return await self._within_deadline(home, endpoint, *args)

    async def _within_deadline(self, home: str, endpoint: str, *args: Any) -> Any:
        calling = asyncio.ensure_future(self._environments.call(home, endpoint, *args))
        try:
            while not (await asyncio.wait([calling], timeout=self._deadline_s))[0]:
                if not await self._waits(home):
                    raise DeadlineExceeded(home, endpoint, self._deadline_s)
            return calling.result()
        finally:
            await cancel_and_wait([calling])

    async def _waits(self, home: str) -> bool:
        """Return whether a late call waits for another service; not where the actor is silent."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return bool(await self._environments.call(home, "waits"))
        except (TimeoutError, ActorDied):
            return False

    async def _home_of_new(self, session_id: str) -> str:
        failed_on = self._failed.get(sample_of(session_id))
        names = await self._environments.some_open()
        others = [name for name in names if name != failed_on] or names
        return min(others, key=lambda name: (self._sessions[name], self._environments.load(name)))

    def _enter(self, session_id: str, home: str) -> None:
        self._homes[session_id] = home
        self._sessions[home] += 1

    def _leave(self, session_id: str) -> str | None:
        home = self._homes.pop(session_id, None)
        if home is not None:
            self._sessions[home] -= 1
            if not self._sessions[home]:
                del self._sessions[home]
        return home

    def _notify(self, home: str, endpoint: str, session_id: str, *args: Any) -> None:
        if home in self._environments:
            telling = self._told(home, endpoint, session_id, *args)
            self._notifying.start(f"{endpoint} {session_id}", telling)

    async def _told(self, home: str, *call: Any) -> None:
        try:
            await self._within_deadline(home, *call)
        except (ActorDied, DeadlineExceeded):
            return  # its sessions are gone with it, or it is killed as hung


ATTEMPTS = 3
"""Judge actors that are tried with one question, where they die of it."""


class PeerJudges:
    """The port `Judges` over all judge actors; its calls come from the task's event loop."""

    def __init__(self, open_stream: OpenStream, limit_s: float) -> None:
        """Questions are sent on the event loop that is running now, and may take `limit_s`."""
        self._own, self._limit_s = asyncio.get_running_loop(), limit_s
        self._actors = Peers(open_stream)

    def connect(self, actors: tuple[Peer, ...], gone: Mapping[str, str]) -> None:
        """Ask these actors from now on."""
        self._actors.update(actors, gone)

    async def ask(self, question: JudgeQuestion) -> JudgeReply:
        """Return a judge's answer. Waits for an actor that serves, and for the judge."""
        asking = self._ask(question.judge, question.messages)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._own))

    async def close(self) -> None:
        """Disconnect from all actors."""
        await self._actors.close()

    async def _ask(self, judge: str, messages: list[Message]) -> JudgeReply:
        try:
            async with asyncio.timeout(self._limit_s):
                return reply_of(judge, await self._anywhere(judge, messages))
        except TimeoutError:
            raise JudgeFailed(judge, f"no judge actor answered in {self._limit_s:g} s") from None

    async def _anywhere(self, judge: str, messages: list[Message]) -> TeacherReply:
        reason = ""
        for _ in range(ATTEMPTS):
            name = min(await self._actors.some_open(), key=self._actors.load)
            try:
                reply: TeacherReply = await self._actors.call(name, "ask", judge, messages)
            except ActorDied as died:
                reason = str(died)
            else:
                return reply
        raise JudgeFailed(judge, f"{ATTEMPTS} judge actors died of it, the last one: {reason}")


Waiting = tuple[GenerationRequest, asyncio.Future[GenerationResult]]


@dataclass(frozen=True)
class Round:
    """One closed batch: for each generator the names of the requests, of all workers together.

    One that `continues` follows another of the same episodes.
    """

    number: int
    continues: bool
    shares: Mapping[str, Sequence[str]]


class LockstepGeneration:
    """The port `Generation` of one worker, which plays `playing()` episodes at the moment."""

    def __init__(self, generators: Peers, playing: Callable[[], int]) -> None:
        self._generators, self._playing = generators, playing
        self._waiting: dict[str, Waiting] = {}
        self._reported: set[str] = set()
        self._all_wait = asyncio.Event()
        self._rounds = BackgroundTasks(reported_to_loop)

    async def generate(self, request: GenerationRequest, _group: str) -> GenerationResult:
        """Sample one continuation. Waits for the round that has it."""
        answer: asyncio.Future[GenerationResult] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = (request, answer)
        self.changed()
        try:
            return await answer
        finally:
            self._waiting.pop(request.request_id, None)

    def changed(self) -> None:
        """Check whether every episode waits; call it when an episode has ended too."""
        episodes = {request_id.rpartition("-")[0] for request_id in self._waiting}
        if episodes and len(episodes) >= self._playing():
            self._all_wait.set()

    async def waiting(self) -> list[str]:
        """Return the names of all waiting requests. Waits until each episode here has one."""
        await self._all_wait.wait()
        self._all_wait.clear()
        self._reported = set(self._waiting)
        return sorted(self._reported)

    def release(self, turn: Round) -> None:
        """Send this worker's requests of a round."""
        for generator, names in turn.shares.items():
            share = [self._waiting.pop(name) for name in names if name in self._waiting]
            if len(share) < len(self._reported.intersection(names)):  # one was cancelled meanwhile
                closing = self._generators.call(generator, "close_round", turn.number)
                self._rounds.start(f"closing round {turn.number} at {generator}", closing)
            if share:
                sending = self._send(turn, generator, share)
                self._rounds.start(f"round {turn.number} at {generator}", sending)

    async def close(self) -> None:
        """Stop the rounds under way."""
        await self._rounds.close()

    async def _send(self, turn: Round, generator: str, share: list[Waiting]) -> None:
        requests = [request for request, _ in share]
        try:
            results = await self._results(turn, generator, requests)
            answered = list(zip(share, results, strict=True))
        except Exception as error:  # noqa: BLE001  every episode of the share must get it
            for _, answer in share:
                if not answer.done():
                    answer.set_exception(error)
            return
        for (_, answer), result in answered:
            if not answer.done():
                settle(answer, result)

    async def _results(
        self, turn: Round, generator: str, requests: list[GenerationRequest]
    ) -> list[GenerationResult | Exception]:
        """Return results from the share's own generator, or from another where that one failed."""
        results: list[GenerationResult | Exception]
        size = len(turn.shares[generator])
        try:
            results = await self._generators.call(
                generator, "generate_round", turn.number, size, requests, turn.continues
            )
        except Exception:  # noqa: BLE001  supervision boundary: sent once more, elsewhere
            names = await self._generators.some_open()
            other = next((name for name in names if name != generator), names[0])
            results = await self._generators.call(other, "generate_many", requests)
        return results


def settle(answer: asyncio.Future[GenerationResult], result: GenerationResult | Exception) -> None:
    """End an answer with its result, or with the error of a request that was aborted."""
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)
