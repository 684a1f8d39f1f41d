"""TRL's `environment_factory` over a served task: the class, its rewards, and one real step."""

import inspect
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Optional

import pytest
from served_tasks import served_beside
from trl_runs import qwen_call, qwen_policy

from composer_mesh.plugins.openenv.client.wire import Tool
from composer_mesh.plugins.openenv.trl_environment import (
    ENDED,
    EnvironmentFactory,
    SessionFailed,
    UnusableTools,
    environment_factory,
    make_class,
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, build_config: Any) -> Iterator[str]:
    config = build_config(data={"task": "served_tasks:Count"})
    with served_beside(tmp_path_factory.mktemp("served"), config) as url:
        yield url


def test_an_episode_has_the_reward_of_its_end(url: str) -> None:
    environment = environment_factory(url)()
    text = environment.reset(prompt=[{"role": "user", "content": ""}], index=3, unknown=object())
    assert "Count to" in text
    assert environment.add(by=2) == "count 2"
    assert environment.add(by=-1) == "error: by is negative"
    environment.answer(text="done")
    assert environment.add(by=5) == ENDED, "TRL goes on until the model calls no tool"
    assert environment.get_reward() == pytest.approx(1.9)


def test_an_episode_that_the_model_left_is_scored_where_it_is(url: str) -> None:
    environment = environment_factory(url)()
    for _ in range(2):
        environment.reset(index=3)
        environment.add(by=2)
        assert environment.get_reward() == 2.0


def test_a_fault_of_the_environment_is_no_reward_and_the_next_episode_is_played(url: str) -> None:
    environment = environment_factory(url)()
    environment.reset(index=3)
    with pytest.raises(SessionFailed, match="KeyError"):
        environment.fail()
    with pytest.raises(SessionFailed, match="KeyError"):
        environment.add(by=1)
    with pytest.raises(SessionFailed, match="KeyError"):
        environment.get_reward()
    environment.reset(index=3)
    environment.add(by=1)
    assert environment.get_reward() == 1.0


def test_a_lost_session_is_no_reward_and_never_goes_on_in_another_episode(
    tmp_path: Path, build_config: Any
) -> None:
    config = build_config(data={"task": "served_tasks:Count"})
    with served_beside(tmp_path, config) as url:
        environment = environment_factory(url)()
        environment.reset(index=3)
    with pytest.raises(SessionFailed):
        environment.add(by=1)
    with pytest.raises(SessionFailed):
        environment.get_reward()


def test_the_factory_can_be_pickled_and_names_no_token(url: str) -> None:
    factory = environment_factory(url, token_env="SERVED")
    assert pickle.loads(pickle.dumps(factory)) == factory
    assert isinstance(factory, EnvironmentFactory)


def test_transformers_reads_the_schema_of_each_tool() -> None:
    from transformers.utils import get_json_schema

    properties = {
        "optional": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "how": {"type": "string", "enum": ["up", "down"], "description": "Args: which\n  way"},
        "many": {"type": "array", "items": {"type": "integer"}},
        "deep": {"$ref": "#/$defs/Deep"},
        "share": {"type": "number", "default": 0.5},
    }
    schema = {"type": "object", "properties": properties, "required": ["how", "many", "deep"]}
    tool = Tool(name="move", description="Moves.\n\nReturns:\n  nothing", input_schema=schema)
    kind: Any = make_class(environment_factory("http://localhost:1"), [tool])
    seen = get_json_schema(kind().move)["function"]
    assert seen["name"] == "move"
    assert set(seen["parameters"]["required"]) == {"how", "many", "deep"}
    assert seen["parameters"]["properties"]["how"]["enum"] == ["up", "down"]
    assert seen["parameters"]["properties"]["many"]["type"] == "array"
    annotations = inspect.signature(kind.move).parameters
    assert annotations["how"].annotation == Literal["up", "down"]
    assert annotations["optional"].annotation == Optional[int]  # noqa: UP045 as it was made


@pytest.mark.parametrize("name", ["reset", "get_reward", "_own", "a b", "class", "9"])
def test_a_tool_that_trl_would_not_find_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnusableTools, match="tool"):
        make_class(environment_factory("http://localhost:1"), [Tool(name=name)])


def test_an_argument_without_a_python_name_is_refused() -> None:
    tool = Tool(name="move", input_schema={"properties": {"a-b": {"type": "string"}}})
    with pytest.raises(UnusableTools, match="'a-b'"):
        make_class(environment_factory("http://localhost:1"), [tool])


@pytest.mark.filterwarnings("ignore")  # of TRL and what it imports
def test_trl_trains_a_real_step_on_it(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import torch
    import trl

    tokenizer, model = qwen_policy()
    call = qwen_call

    turns = iter(
        [
            [call("add", by=1), call("add", by=3)],
            [call("answer", text="done"), call("answer", text="done")],
            ["Good.<|im_end|>", "Good.<|im_end|>"],
        ]
    )

    class Scripted(trl.GRPOTrainer):
        """Its model always says the same; what it is trained on is real."""

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            said = next(turns)
            assert len(prompt_ids) == len(said)
            return [tokenizer(one, add_special_tokens=False).input_ids for one in said], None

    settings = trl.GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=1024,
        learning_rate=1.0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    before = [one.detach().clone() for one in model.parameters()]
    trainer = Scripted(
        model=model,
        args=settings,
        processing_class=tokenizer,
        environment_factory=environment_factory(url, name="Counts"),
    )
    trainer.train()
    logged = next(one for one in trainer.state.log_history if "reward" in one)
    assert logged["rewards/Counts/mean"] == 2.0, "1 and 3"
    assert logged["tools/call_frequency"] == 2.0
    assert logged["tools/failure_frequency"] == 0.0
    after = list(model.parameters())
    assert any(not torch.equal(one, two) for one, two in zip(before, after, strict=True))
