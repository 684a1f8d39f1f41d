"""Evaluates an OpenAI-compatible endpoint: episodes run in this process, actions come by HTTP."""

from __future__ import annotations

from composer_mesh.actors.provider.bill import Meter
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import TeacherEndpoint
from composer_mesh.actors.provider.errors import (
    ProviderAuthError,
    ProviderBudgetError,
    ProviderError,
    ProviderPaymentError,
)
from composer_mesh.configs.schema import Config
from composer_mesh.rollouts.episode import seed_of
from composer_mesh.rollouts.tasks import Episode
from composer_mesh.rollouts.traces import Trace
from composer_mesh.services.evaluation.in_process import InProcessEvaluation, Policy
from composer_mesh.services.steps.ports import Store
from composer_mesh.tasks.running import RunningEpisode
from composer_mesh.tasks.task import Task

SEEDS = 2**31
"""Seeds are below this: some servers take 32 bits."""


class EndpointEvaluation(InProcessEvaluation):
    """Plays held-out episodes against one endpoint, on one event loop."""

    def __init__(
        self,
        config: Config,
        task: Task,
        store: Store,
        client: ProviderClient,
        endpoint: TeacherEndpoint,
        samples: int,
        meter: Meter | None = None,
    ) -> None:
        """A `meter` refuses requests that might pass its ceiling."""
        super().__init__(config, task, store, samples, endpoint.concurrency)
        self._client, self._endpoint, self._meter = client, endpoint, meter
        self.usd = 0.0
        """Dollars that the endpoint has stated."""

    async def _sample(self, index: int, number: int) -> Trace | None:
        """Play one sample; None if it failed.

        Raises where the key is refused, or no credit or budget is left.
        """
        try:
            return await super()._sample(index, number)
        except (ProviderAuthError, ProviderPaymentError, ProviderBudgetError):
            raise
        except ProviderError as error:
            self.failures.append(endpoint_failure(self._endpoint, error))
        return None

    async def _policy(self, _episode: Episode, name: str) -> Policy:
        async def ask(running: RunningEpisode, turn: int) -> str:
            seed = seed_of(self._config.run.seed, f"{name}-{turn:02d}") % SEEDS
            answer = await self._client.complete(
                *(self._endpoint, running.messages, self._task.tools), seed=seed, meter=self._meter
            )
            self.usd += answer.usd
            return answer.action_text

        return ask


def endpoint_failure(endpoint: TeacherEndpoint, error: ProviderError) -> str:
    """Return what an endpoint failed with, and what to look at in this command."""
    if isinstance(error, ProviderBudgetError):
        return f"{error.text}: raise --max-usd, and go on with --resume"
    return (
        f"{endpoint.base_url}, model {endpoint.model!r}: {error.text}: check that it answers, and "
        "--model, --api-key-env, --max-tokens and --timeout"
    )
