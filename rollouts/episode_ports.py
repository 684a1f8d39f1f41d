"""What an episode is played against, as protocols that actors and test fakes implement."""

from typing import Protocol

from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult
from composer_mesh.rollouts.tasks import Episode, Outcome, StepResult
from composer_mesh.rollouts.traces import Message


class Generation(Protocol):
    """Samples tokens. Requests of one `group` have prompts in common."""

    async def generate(self, request: GenerationRequest, group: str, /) -> GenerationResult: ...


class Environments(Protocol):
    """Steps episodes, each in a session that is started, and then finished or abandoned."""

    async def begin(self, session_id: str, episode: Episode) -> list[Message]: ...

    async def step(self, session_id: str, text: str) -> StepResult: ...

    async def finish(self, session_id: str) -> Outcome: ...

    def abandon(self, session_id: str) -> None: ...
