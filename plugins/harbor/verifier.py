"""Verifies a step: tests are copied in from outside after the agent has stopped, and run as root.

    the agent's processes end -> /tests and /logs/verifier are removed -> tests are copied in
    -> test.sh -> its processes end -> /logs/verifier is read from outside

A step without a reward is judged by evidence, not by rule:

    the same tests again on the same machine     give one: that is the reward
    else the same tests on a fresh machine       give one: the agent's machine is the cause, 0
                                                 give none: `TestsFailed`, which is no reward

The second try has twice the time, so that a slow machine is not taken for a late agent.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch

from composer_mesh.plugins.harbor import monitor
from composer_mesh.plugins.harbor.containers.port import (
    Container,
    ContainerSettings,
    FinishedCommand,
    ImageSource,
    TooLarge,
)
from composer_mesh.plugins.harbor.machine import (
    SETUP_S,
    Machine,
    kind_of,
    prepare_step,
    put,
    settings_of,
    user_of,
)
from composer_mesh.plugins.harbor.proxy import proxied
from composer_mesh.plugins.harbor.rewards import VerifierFault, read_rewards, reward_of
from composer_mesh.plugins.harbor.task_folder import Files, TaskStep, resolved
from composer_mesh.tasks.sandbox import MIB, SandboxError

MOST_RESULTS = 16 * MIB
MOST_ARTIFACTS = 256 * MIB
OUTPUT = 256 * 1024
TRIES = 2
Artifacts = Mapping[str, Mapping[str, bytes]]
"""Files by folder and relative path."""
TESTS, LOGS, ARTIFACTS = "/tests", "/logs/verifier", "/logs/artifacts"


class TestsFailed(SandboxError):
    """Tests give no reward on any machine, so an episode has none; `kind` is that of the fault."""

    __test__ = False  # for pytest, which collects classes of this name

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


@dataclass(frozen=True)
class StepVerdict:
    """The rewards of a step by key, and what was found. `again` counts repeated tests."""

    rewards: Mapping[str, float]
    findings: Mapping[str, int] = field(default_factory=dict)
    again: int = 0
    output: str = ""


class Verifier:
    """Verifies the steps of machines; remembers which tests work on a fresh machine."""

    def __init__(self, reward_key: str) -> None:
        self._key = reward_key
        self._working: set[tuple[str, str]] = set()

    async def verify(self, machine: Machine) -> StepVerdict:
        """Verify the present step of a machine. Waits for its tests.

        A machine whose last step is verified may have ended afterwards. Raises SandboxError where a
        container fails, or tests give no reward on any machine.
        """
        step, findings = machine.step, Counter(machine.noted)
        machine.noted.clear()
        for hook in step.verifier.collect:
            await machine.container.run(
                ["/bin/sh", "-c", hook.command],
                timeout_s=hook.timeout_sec,
                user=user_of(hook.user),
                environment=machine.variables,
            )
        await machine.end_agent()
        artifacts = None
        if step.verifier.separate:
            artifacts = await artifacts_of(machine, step)
            await machine.release()  # two containers of one episode could wait for each other
        else:
            findings.update(await inspect(machine))
            await machine.change_network(machine.tests_network)
        verdict = await self._verdict(machine, artifacts, findings)
        await machine.resume()
        return verdict

    async def _verdict(
        self, machine: Machine, artifacts: Artifacts | None, findings: Counter[str]
    ) -> StepVerdict:
        for again in range(TRIES):
            try:
                rewards, output = await self._tried(machine, artifacts, findings, 2.0**again)
            except VerifierFault as error:
                fault = error
            else:
                return StepVerdict(rewards, findings, again, output)
        await self._refuse_broken(machine, fault)
        findings["verifier_broken"] += 1
        return StepVerdict({}, findings, TRIES - 1, str(fault))

    async def _tried(
        self,
        machine: Machine,
        artifacts: Artifacts | None,
        findings: Counter[str],
        patience: float,
    ) -> tuple[dict[str, float], str]:
        """Run the tests of the present step once; add what is found. Raises VerifierFault."""
        if artifacts is None:
            return await self._tested(machine, machine.container, findings, patience)
        container = await machine.containers.start(_verifier_settings(machine))
        try:
            for folder, files in artifacts.items():
                await container.put(files, folder)
            return await self._tested(machine, container, findings, patience)
        finally:
            await container.close()

    async def _tested(
        self, machine: Machine, container: Container, findings: Counter[str], patience: float
    ) -> tuple[dict[str, float], str]:
        """Copy the tests of the present step into a container and run them."""
        step = machine.step
        user = user_of(step.verifier.user) or "root"
        await container.remove(LOGS)
        await container.put({}, LOGS, owner=user)
        tests = await asyncio.to_thread(step.tests) if step.tests_image is None else Files({})
        if tests.contents:
            await container.remove(TESTS)
            await put(container, Files(tests.contents, {*tests.executable, "test.sh"}), TESTS)
        async with proxied(
            container, machine.tests_network, machine.limits.outside, machine.settings.names
        ) as variables:
            done = await container.run(
                _command(tests),
                timeout_s=step.verifier.timeout_sec * patience,
                user=user,
                environment={**variables, **_environment(machine)},
                output_bytes=OUTPUT,
            )
        await container.stop_processes()
        try:
            files = await container.get(LOGS, most_bytes=MOST_RESULTS)
        except FileNotFoundError:
            files = {}
        except TooLarge as error:
            raise VerifierFault("bad_reward", f"{LOGS} is too large: {error}") from None
        return self._rewards(done, files, tests, findings), _text(done)

    def _rewards(
        self,
        done: FinishedCommand,
        files: Mapping[str, bytes],
        tests: Files,
        findings: Counter[str],
    ) -> dict[str, float]:
        if done.ended == "wall_time":
            raise VerifierFault("verifier_timeout", f"test.sh took over {done.seconds:.0f} s")
        if done.ended != "exited":
            raise VerifierFault("verifier_killed", f"test.sh was ended by {done.ended}")
        try:
            rewards = read_rewards(files)
            reward_of(rewards, self._key)
        except VerifierFault as fault:
            said = f"{fault.detail}; test.sh said: {_text(done)[-300:]}"
            raise VerifierFault(fault.kind, said) from None
        used = "reward.json" if "reward.json" in files else "reward.txt"
        if monitor.unexpected_reward(used, tests.contents):
            findings["reward_unexpected"] += 1
        return rewards

    async def _refuse_broken(self, machine: Machine, fault: VerifierFault) -> None:
        """Raise TestsFailed where these tests give no reward on a fresh machine either."""
        step, name = machine.step, machine.folder.name
        if (name, step.name) in self._working:
            return
        if not step.verifier.separate:
            await machine.release()
        own = replace(machine.settings, network=kind_of(machine.network))
        if step.verifier.separate:
            own = _verifier_settings(machine)
        container, services = await machine.containers.start(own), machine.new_services()
        try:
            if not step.verifier.separate:
                outside, names = machine.limits.outside, machine.settings.names
                await services.start(container)
                async with proxied(container, machine.network, outside, names) as variables:
                    await prepare_step(container, step, machine.workdir, variables)
                await container.stop_processes(kind_of(machine.tests_network))
            await self._tested(machine, container, Counter(), 2.0)
        except VerifierFault:
            what = f"tests of Harbor task {name!r} give no reward on any machine"
            raise TestsFailed(fault.kind, f"{what}: {fault.detail}") from None
        finally:
            try:
                await services.close()
            finally:
                await container.close()
        self._working.add((name, step.name))


async def inspect(machine: Machine) -> Counter[str]:
    """Return what the agent changed of the image; remove what tests must not find of that."""
    container, every = machine.container, await machine.container.changes()
    changes = {path: how for path, how in every.items() if path not in machine.accepted}
    found = monitor.of_changes(changes, machine.programs)
    for path in sorted(monitor.removable(changes)):
        await container.remove(path)
    for folder in monitor.package_records(changes):
        try:
            files = await container.get(folder, most_bytes=MIB)
        except (FileNotFoundError, TooLarge):
            continue  # it is no record that pytest reads
        found["test_plugin"] += monitor.has_plugin(files)
    return +found


async def artifacts_of(machine: Machine, step: TaskStep) -> Artifacts:
    """Return what a separate verifier gets: declared paths, and /logs/artifacts, by folder.

    A path that is missing or too large is left out, as work that was not done.
    """
    found: dict[str, dict[str, bytes]] = {}
    sources = {one.source: one.exclude for one in step.artifacts}
    for source, exclude in {ARTIFACTS: [], **sources}.items():
        path = source if source.startswith("/") else f"{machine.workdir.rstrip('/')}/{source}"
        try:
            files = await machine.container.get(path, most_bytes=MOST_ARTIFACTS)
            folder = path
        except FileNotFoundError:
            folder, _, name = path.rpartition("/")
            files = await _file(machine.container, path, name)
            folder = folder or "/"
        except TooLarge:
            continue
        kept = {one: files[one] for one in files if not _excluded(one, exclude)}
        found.setdefault(folder, {}).update(kept)
    return found


async def _file(container: Container, path: str, name: str) -> Mapping[str, bytes]:
    """Return a single file; the agent's own programs may lie about what is the agent's own."""
    done = await container.run(["cat", "--", path], timeout_s=SETUP_S, output_bytes=OUTPUT * 64)
    return {name: done.output} if done.exit_code == 0 and not done.output_cut else {}


def _excluded(path: str, patterns: list[str]) -> bool:
    parts = [path, *path.split("/")]
    return any(fnmatch(part, pattern) for pattern in patterns for part in parts)


def _verifier_settings(machine: Machine) -> ContainerSettings:
    """Return the settings of a separate verifier's container."""
    step = machine.step
    settings = settings_of(
        machine.folder,
        machine.limits,
        machine.tests_network,
        machine.compose.main,
        step.verifier.environment,
    )
    if step.tests_image is None:
        return settings
    return replace(settings, image=ImageSource(build=step.tests_image))


def _environment(machine: Machine) -> dict[str, str]:
    """Return the variables of tests that the task states."""
    where = f"{machine.folder.name}: verifier.env"
    return resolved(machine.step.verifier.env, machine.limits.variables, where)


def _command(tests: Files) -> list[str]:
    script = tests.contents.get("test.sh", b"#!")
    return [f"{TESTS}/test.sh"] if script.startswith(b"#!") else ["/bin/sh", f"{TESTS}/test.sh"]


def _text(done: FinishedCommand) -> str:
    return (done.output + done.errors).decode(errors="replace").strip()[-4000:]
