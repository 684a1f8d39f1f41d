"""Sends the requests of a rollout worker to the generators, each as it arrives.

A request whose generator died is sent to another one with the same seed, and so is one that failed,
once: a second equal error is raised.
"""

from __future__ import annotations

from composer_mesh.actors.rollout_workers.peers import Peers
from composer_mesh.actors.rollout_workers.sticky_routing import StickyRouting
from composer_mesh.mesh.failures import error_key
from composer_mesh.rollouts.generation import GenerationRequest, GenerationResult


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
                result: GenerationResult = await self._generators.call(name, "generate", request)
                return result
            except Exception as error:  # supervision boundary: another generator may do it
                if attempt == self._attempts or error_key(error) == raised:
                    raise
                raised = error_key(error)
        raise AssertionError("a request is sent at least once")
