"""What the environments of a run are told of its judges."""

from __future__ import annotations

from typing import cast

from fake_host import turns
from fake_pool import Member, Pool

from composer_mesh.actors.provider.endpoint import Keys
from composer_mesh.configs.schema import Config
from composer_mesh.services.run.pools import MeshJudges
from composer_mesh.services.service import Service


def connected(judges: Pool, environments: Pool) -> MeshJudges:
    config = Config.model_validate(
        {"run": {"name": "judged", "steps": 1}, "data": {"task": "arithmetic"}}
    )
    mesh = MeshJudges(
        cast(Service, judges), cast(Service, environments), config, Keys({}), lambda *_, **__: None
    )
    mesh.connect()
    return mesh


def told(environment: Member) -> tuple[list[str], dict[str, str]]:
    """The judges of the last call, and why the others are gone."""
    endpoint, name, peers, gone = environment.calls[-1]
    assert (endpoint, name) == ("connect_judges", environment.name)
    return [peer.name for peer in peers], gone


async def test_environments_hear_why_a_judge_is_gone_and_only_of_those_that_are() -> None:
    judges = Pool([Member("judge-0"), Member("judge-1")])
    environment = Member("environment-0")
    mesh = connected(judges, Pool([environment]))
    await turns()
    assert told(environment) == (["judge-0", "judge-1"], {})
    judges.change("judge-1")
    await turns()
    assert told(environment) == (["judge-1"], {"judge-0": "judge-0 was killed"})
    judges.change("judge-1", draining=("judge-1",))
    await turns()
    assert told(environment) == (["judge-1"], {"judge-0": "judge-0 was killed"})
    await mesh.close()


async def test_an_environment_that_comes_later_is_told_and_the_others_are_not_told_again() -> None:
    environments = Pool([Member("environment-0")])
    mesh = connected(Pool([Member("judge-0")]), environments)
    await turns()
    first = environments.replicas[0]
    later = Member("environment-1")
    environments.replicas = [first, later]
    environments.tell()
    await turns()
    assert (len(first.calls), told(later)) == (1, (["judge-0"], {}))
    await mesh.close()


async def test_judges_drop_what_an_environment_that_is_gone_asked() -> None:
    judges, environments = Pool([Member("judge-0")]), Pool([Member("environment-0")])
    mesh = connected(judges, environments)
    environments.change()
    await turns()
    assert judges.asked == [("close_calls", "environment-0")]
    await mesh.close()
