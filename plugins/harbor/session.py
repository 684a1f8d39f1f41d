"""An attempt at a Harbor task: the agent's tools in its container, and the verdict on its work.

`machine` is the way to the container for whatever else plays in it, such as a harness program.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from composer_mesh.plugins.harbor.containers.port import FinishedCommand
from composer_mesh.plugins.harbor.harness import ROW, Launch
from composer_mesh.plugins.harbor.harness_mcp import with_servers
from composer_mesh.plugins.harbor.machine import Machine
from composer_mesh.plugins.harbor.mcp_servers import TaskMcpServers
from composer_mesh.plugins.harbor.monitor import flagged_by
from composer_mesh.plugins.harbor.rewards import mean_of, reaches, reward_of
from composer_mesh.plugins.harbor.services import said
from composer_mesh.plugins.harbor.verifier import StepVerdict
from composer_mesh.rollouts.traces import Message
from composer_mesh.tasks.calls import waiting_for_others
from composer_mesh.tasks.errors import ToolError, UnusableTask
from composer_mesh.tasks.session import Reply, Session
from composer_mesh.tasks.tool import tool

if TYPE_CHECKING:
    from composer_mesh.plugins.harbor.task import HarborTask

LONGEST_SHOWN = 200
WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
Command = Annotated[str, Field(min_length=1, max_length=100_000)]
Path = Annotated[str, Field(min_length=1, max_length=1000)]
Text = Annotated[str, Field(max_length=400_000)]
Line = Annotated[int, Field(ge=1, le=10_000_000)]
Count = Annotated[int, Field(ge=1, le=5000)]
Timeout = Annotated[int, Field(ge=1, le=86_400)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


@dataclass(frozen=True)
class EpisodeVerdict:
    """What the verifier says of all steps together, and what the monitor found.

    `reward` is 0 where a finding voids it: such tests prove nothing.
    """

    reward: float
    rewards: dict[str, float]
    findings: dict[str, int]
    steps: tuple[StepVerdict, ...]

    @property
    def again(self) -> int:
        """How often tests were repeated because they gave no reward."""
        return sum(step.again for step in self.steps)


class HarborSession(Session):
    """One attempt at a Harbor task."""

    task: HarborTask
    machine: Machine
    """The container, and the step of the task that it is in."""
    _judgement: EpisodeVerdict | None = None
    _harness: Launch | None = None

    def __init__(self) -> None:
        self._verdicts: list[StepVerdict] = []
        self._stopped = False
        self._servers: TaskMcpServers | None = None

    async def start(self) -> None:
        """Start the container, then the MCP servers. Waits for both; raises SandboxError.

        A harness opens these itself: it gets them in its configuration.
        """
        folder, launch = self.task.folder_of(self.row), Launch.of(self.row)
        servers = folder.mcp_servers(self.task.limits.variables)
        if launch is not None:
            self._harness = with_servers(
                launch, folder.name, servers, list(folder.toml.environment.env)
            )
        mounts = {} if launch is None else launch.mounts
        self.machine = Machine(self.task.containers, folder, self.task.limits, mounts)
        try:
            with waiting_for_others():
                await self.machine.start()
                if servers and launch is None:
                    self._servers = TaskMcpServers(self.machine, servers)
                    await self._servers.start()
        except BaseException:
            await self.close()
            raise

    def opening(self) -> str | list[Message]:
        """Return the instruction, with the tools of MCP servers if there are any."""
        text = str(self.row["prompt"])
        return text if self._servers is None else f"{text}\n\n{self._servers.described()}"

    async def close(self) -> None:
        try:
            if self._servers is not None:
                await self._servers.close()
        finally:
            if hasattr(self, "machine"):
                await self.machine.close()

    async def reply(self, text: str) -> str | Reply | None:
        """End the step: an answer without a call is the end of the work on it.

        Where a harness plays, any answer has it work on the step first.
        """
        if self._harness is None:
            return await self._next()
        with waiting_for_others():
            done = await self._harness.play(self.machine, lambda: int(self.row[ROW]["port"]))
        failure: ToolError | None = None
        if done.exit_code != 0:
            failure = ToolError("harness_failed", said(done), {"harness": said(done)})
        following = await self._next()
        messages: list[Message] = []
        if following is not None:
            messages = [{"role": "user", "content": following}]
        return Reply(messages, following is None, failure)

    @tool
    async def bash(self, command: Command, timeout_s: Timeout | None = None) -> str:
        """Runs a command of the shell in the working folder; each call is a new shell.

        Files and background processes stay; variables and the present folder do not.

        Args:
            command: What the shell runs; it may have several lines.
            timeout_s: Seconds after which it is ended.
        """
        seconds = timeout_s or self.task.options.command_s
        with waiting_for_others():
            done = await self.machine.run(command, seconds)
        if done.ended != "wall_time" or self.machine.remaining_s > 0:
            return self._shown(done, command)
        following = await self._next()
        if following is None:
            self.end()
        text = f"the time for this step is used up\n{following or ''}".rstrip()
        raise ToolError("agent_timeout", text, self._facts(done, command))

    @tool
    async def read_file(self, path: Path, first_line: Line = 1, lines: Count = 250) -> str:
        """Reads lines of a text file.

        Args:
            path: Path of the file, absolute or from the working folder.
            first_line: Number of the first line.
            lines: How many lines.
        """
        last = first_line + lines - 1
        argv = ["sed", "-n", f"{first_line},{last}p", "--", path]
        done = await self._run(argv)
        if done.exit_code != 0:
            raise self._no_file(path, done)
        return self.task.cut(done.output.decode(errors="replace"))

    @tool
    async def write_file(self, path: Path, content: Text) -> str:
        """Writes a whole file; one that exists is replaced.

        Args:
            path: Path of the file, absolute or from the working folder.
            content: All that the file contains afterwards.
        """
        argv = ["/bin/sh", "-c", WRITE, "sh", path]
        done = await self._run(argv, content.encode(errors="replace"))
        if done.exit_code != 0:
            raise self._no_file(path, done)
        return f"{path} was written"

    @tool
    async def call_mcp_tool(self, server: Name, tool: Name, arguments: dict[str, Any]) -> str:
        """Calls a tool of an MCP server that the first message lists.

        Args:
            server: Name of the server.
            tool: Name of the tool.
            arguments: Its arguments, as its schema says.
        """
        if self._servers is None:
            raise ToolError("unknown_mcp_tool", "this task has no MCP server", {"tool": tool[:40]})
        with waiting_for_others():
            said = await self._servers.call(server, tool, arguments, self.task.options.command_s)
        return self.task.cut(said)

    @tool
    async def submit(self) -> str:
        """Ends the work on the present step; what the container is now is tested."""
        following = await self._next()
        if following is None:
            self.end()
            return "submitted"
        return following

    async def judgement(self) -> EpisodeVerdict:
        """Verify the work, once. Waits for the tests of all steps that are left.

        Steps that the agent has not reached are verified as they are. Raises SandboxError.
        """
        if self._judgement is None:
            with waiting_for_others():
                while not self._stopped and await self._verified_step():
                    pass  # a step that the agent has not reached
            self._judgement = self._judged()
        return self._judgement

    @property
    def judged(self) -> EpisodeVerdict:
        """The verdict, once rewards have requested it."""
        if self._judgement is None:
            raise UnusableTask("the session is not judged yet: its rewards are computed first")
        return self._judgement

    async def _next(self) -> str | None:
        """Verify the present step if others follow; return the next instruction, or None."""
        if self._stopped or self.machine.is_last:
            return None
        with waiting_for_others():
            if not await self._verified_step():
                return None
            if self._servers is not None:
                await self._servers.start()
        return await asyncio.to_thread(lambda: self.machine.step.instruction)

    async def _verified_step(self) -> bool:
        """Verify the present step; return whether the next one has begun, as rewards allow it."""
        verdict = await self.task.verifier.verify(self.machine)
        self._verdicts.append(verdict)
        self._stopped = self.machine.is_last or not reaches(
            verdict.rewards, self.machine.step.min_reward
        )
        if self._stopped:
            return False
        await self.machine.next_step()
        return True

    def _judged(self) -> EpisodeVerdict:
        strategy = self.machine.folder.toml.multi_step_reward_strategy or "mean"
        every = [verdict.rewards for verdict in self._verdicts]
        rewards = dict(every[-1]) if strategy == "final" else mean_of(every)
        found: Counter[str] = Counter()
        for verdict in self._verdicts:
            found.update(verdict.findings)
        void = flagged_by(found, self.task.options.void)
        reward = 0.0 if void or not rewards else reward_of(rewards, self.task.options.reward_key)
        return EpisodeVerdict(reward, rewards, dict(found), tuple(self._verdicts))

    async def _run(self, argv: list[str], stdin: bytes = b"") -> FinishedCommand:
        with waiting_for_others():
            return await self.machine.run_program(
                argv, stdin=stdin, timeout_s=self.task.options.command_s
            )

    def _shown(self, done: FinishedCommand, command: str) -> str:
        """Return what a command printed; raise ToolError for one that was ended."""
        text = self.task.cut((done.output + done.errors).decode(errors="replace"))
        cut = "[the output was too long and is cut]" if done.output_cut else ""
        if done.ended == "wall_time":
            said = f"it took too long and was ended\n{text}"
            raise ToolError("command_timeout", said, self._facts(done, command))
        if done.ended == "memory":
            raise ToolError("command_memory", f"it used too much memory\n{text}")
        code = "ended by a signal" if done.exit_code is None else f"exit code {done.exit_code}"
        return "\n".join(part for part in (text.rstrip("\n"), cut, code) if part)

    def _facts(self, done: FinishedCommand, command: str) -> dict[str, str]:
        return {"command": command[:LONGEST_SHOWN], "limit": f"{done.seconds:.0f}"}

    def _no_file(self, path: str, done: FinishedCommand) -> ToolError:
        said = done.errors.decode(errors="replace").strip()[-300:] or done.ended
        shown = path[:LONGEST_SHOWN]
        return ToolError("file_error", f"{shown}: {said}", {"path": shown, "reason": said})
