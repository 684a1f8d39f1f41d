"""AReaL's own workflows as `make` functions, with rewards that its worker processes can import."""

from __future__ import annotations

from typing import Any


def has_a_digit(_prompt: str, completion: str, *_ids: Any, **_row: Any) -> float:
    return float(any(one.isdigit() for one in completion))


def settings(**changes: Any) -> Any:
    from areal.api.cli_args import GenerationHyperparameters

    return GenerationHyperparameters(**{"max_new_tokens": 40, **changes})


def one_turn(tokenizer: Any) -> Any:
    from areal.workflow.rlvr import RLVRWorkflow

    return RLVRWorkflow(has_a_digit, settings(), tokenizer)


def several_turns(tokenizer: Any) -> Any:
    from areal.workflow.multi_turn import MultiTurnWorkflow

    return MultiTurnWorkflow(has_a_digit, settings(), tokenizer, max_turns=3, turn_discount=0.5)


def remax(tokenizer: Any) -> Any:
    """The ReMax of AReaL's guide: the reward of a sample less that of the greedy answer."""
    import asyncio

    from areal.workflow.rlvr import RLVRWorkflow

    class ReMax(RLVRWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            greedy = RLVRWorkflow(has_a_digit, settings(greedy=True), self.tokenizer)
            own, baseline = await asyncio.gather(
                super().arun_episode(engine, data), greedy.arun_episode(engine, data)
            )
            own["rewards"] = own["rewards"] - baseline["rewards"]
            return own

    return ReMax(has_a_digit, settings(), tokenizer)


def rejects(tokenizer: Any) -> Any:
    from areal.workflow.rlvr import RLVRWorkflow

    class Rejects(RLVRWorkflow):
        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
            await super().arun_episode(engine, data)
            return None

    return Rejects(has_a_digit, settings(), tokenizer)
