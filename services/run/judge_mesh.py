"""The judges of a run: their pool, which environments call, and what they have cost.

environments -- questions of rewards --> judges       in batches, past the controller
pools -- members change --> MeshJudges --> environments: the judge actors
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from composer_mesh.actors.panel.configured import judge_settings
from composer_mesh.actors.provider.keys import Keys
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.background import BackgroundTasks
from composer_mesh.mesh.failures import cause_of, recorded_by
from composer_mesh.mesh.supervision import ActorDied, Recorder
from composer_mesh.rollouts.budget import BudgetReport
from composer_mesh.rollouts.money import dollars
from composer_mesh.services.pool.peers import PoolPeers
from composer_mesh.services.pool.replicas import Replica
from composer_mesh.services.service import Service


@dataclass
class MeshJudges:
    """The pool of judge actors, and the environments that are told of it."""

    pool: Service
    environments: Service
    config: Config
    keys: Keys = field(repr=False)
    record: Recorder = field(repr=False)
    _spent: int = 0
    _told: set[str] = field(default_factory=set)
    _judges: PoolPeers = field(init=False, repr=False)
    _tasks: BackgroundTasks = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._judges = PoolPeers(self.pool)
        self._tasks = BackgroundTasks(recorded_by(self.record))

    async def load(self, run: Path) -> None:
        """Open connections, ledger and cache; raises if a judge or a file cannot be used."""
        await self.pool.load(judge_settings(self.config, run), self.keys)
        self._spent = (await self._report()).run.spent

    def connect(self) -> None:
        """Tell the environments of the judge actors, now and whenever either change."""
        for pool in (self.pool, self.environments):
            pool.on_change(self._update)
        self._update()

    async def figures(self) -> dict[str, float]:
        """Return the dollars since the last call, and of the whole run with its questions."""
        report = await self._report()
        before, self._spent = self._spent, report.run.spent
        return {
            "judge/usd": dollars(self._spent - before),
            "judge/usd_total": dollars(self._spent),
            "judge/requests": report.run.requests,
        }

    async def close(self) -> None:
        """Stop telling environments; the pool is closed with all others."""
        await self._tasks.close()

    async def _report(self) -> BudgetReport:
        report: BudgetReport = await self.pool.report()
        return report

    def _update(self) -> None:
        changed = self._judges.refresh()
        environments = {one.name: one for one in _serving(self.environments)}
        for name in self._told - environments.keys():
            self._tasks.start(f"ending the questions of {name}", self._hang_up(name))
        to_tell = environments.keys() if changed else environments.keys() - self._told
        for name in to_tell:
            self._tasks.start(f"judges of {name}", self._tell(environments[name]))
        self._told = set(environments)

    async def _tell(self, environment: Replica) -> None:
        assert environment.actor is not None
        judges, gone = self._judges.peers, dict(self._judges.gone)
        try:
            await environment.actor.call("connect_judges", environment.name, judges, gone)
        except ActorDied:
            return
        except Exception as error:  # noqa: BLE001  supervision boundary: it is replaced
            reason = f"it cannot be told of the judges: {cause_of(error)}"
            self.environments.lose(environment.name, reason)

    async def _hang_up(self, environment: str) -> None:
        """Have the judge actors drop what an environment that is gone asked of them."""
        for one in _serving(self.pool):
            assert one.actor is not None
            try:
                await one.actor.call("hang_up", environment)
            except ActorDied:
                continue


def _serving(pool: Service) -> list[Replica]:
    return [one for one in pool.members() if one.serving and one.actor is not None]
