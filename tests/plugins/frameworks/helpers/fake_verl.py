"""verl's functions and engine by their recorded names, over a tiny model of this project.

Importing this module makes `verl` importable where it is not installed.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

RECORDED = json.loads((Path(__file__).parents[1] / "unit" / "recorded" / "verl.json").read_text())
ESTIMATORS: dict[str, Any] = {}
POLICY_LOSSES: dict[str, Any] = {}
AGENT_LOOPS: dict[str, Any] = {}


def recorded_class(name: str) -> Any:
    """A class with the fields that verl's has, each with a default."""
    fields = [(one, Any, field(default=None)) for one in RECORDED["fields"][name]]
    return make_dataclass(name, fields)


def recorded(name: str) -> Callable[[Any], Any]:
    """Check that a function of this module takes what verl's takes."""

    def check(function: Any) -> Any:
        found = list(inspect.signature(function).parameters)
        assert found == RECORDED["functions"][name], (name, found)
        return function

    return check


def register_adv_est(name: str) -> Callable[[Any], Any]:
    return lambda function: ESTIMATORS.setdefault(name, function)


def register_policy_loss(name: str) -> Callable[[Any], Any]:
    return lambda function: POLICY_LOSSES.setdefault(name, function)


@recorded("agg_loss")
def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    dp_size: int = 1,
    batch_num_tokens: int | None = None,
    global_batch_size: int | None = None,
    loss_scale_factor: int | None = None,
) -> Tensor:
    assert loss_agg_mode == "token-mean"
    return (loss_mat * loss_mask).sum() / (batch_num_tokens or loss_mask.sum()) * dp_size


@recorded("ppo_loss")
def ppo_loss(config: Any, model_output: Any, data: Any, dp_group: Any = None) -> Any:
    config.global_batch_info |= {
        name: data[name] for name in ("dp_size", "batch_num_tokens", "global_batch_size")
    }
    columns = {
        name: data[name].to_padded_tensor(0)
        for name in ("response_mask", "old_log_probs", "advantages")
    }
    return POLICY_LOSSES[config.policy_loss["loss_mode"]](
        old_log_prob=columns["old_log_probs"],
        log_prob=no_padding_2_padding(model_output["log_probs"], data),
        advantages=columns["advantages"],
        response_mask=columns["response_mask"].bool(),
        loss_agg_mode=config.loss_agg_mode,
        config=config,
        rollout_is_weights=None,
    )


@recorded("no_padding_2_padding")
def no_padding_2_padding(tensor: Tensor, data: Any) -> Tensor:
    lengths = data["responses"].offsets().diff().tolist()
    rows = [
        one[len(one) - length - 1 : -1]
        for one, length in zip(tensor.unbind(), lengths, strict=True)
    ]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@recorded("get_tensordict")
def get_tensordict(
    tensor_dict: dict[str, Any], non_tensor_dict: dict[str, Any] | None = None
) -> Any:
    assert not set(tensor_dict) & set(non_tensor_dict or {})
    assert len({len(one) for one in tensor_dict.values()}) == 1, "rows have equal keys"
    return {**tensor_dict, **(non_tensor_dict or {})}


class AgentLoopBase:
    """Keeps what verl hands an agent loop."""

    @recorded("AgentLoopBase.__init__")
    def __init__(
        self: Any,
        trainer_config: Any,
        server_manager: Any,
        tokenizer: Any,
        processor: Any,
        dataset_cls: Any,
        data_config: Any,
        hf_model_type: Any = None,
        **kwargs: Any,
    ) -> None:
        self.rollout_config = trainer_config.config.actor_rollout_ref.rollout
        self.server_manager, self.tokenizer = server_manager, tokenizer
        self.apply_chat_template_kwargs: dict[str, Any] = {}


def _install() -> None:
    members: dict[str, dict[str, Any]] = {
        "verl": {},
        "verl.trainer": {},
        "verl.trainer.ppo": {},
        "verl.trainer.ppo.core_algos": {
            "agg_loss": agg_loss,
            "register_adv_est": register_adv_est,
            "register_policy_loss": register_policy_loss,
        },
        "verl.experimental": {},
        "verl.experimental.agent_loop": {},
        "verl.experimental.agent_loop.agent_loop": {
            "AgentLoopBase": AgentLoopBase,
            "_agent_loop_registry": AGENT_LOOPS,
            **{name: recorded_class(name) for name in ("AgentLoopOutput", "AgentLoopMetrics")},
        },
        "verl.workers": {},
        "verl.workers.utils": {},
        "verl.workers.utils.losses": {"ppo_loss": ppo_loss},
        "verl.workers.utils.padding": {"no_padding_2_padding": no_padding_2_padding},
        "verl.utils": {},
        "verl.utils.tensordict_utils": {"get_tensordict": get_tensordict},
    }
    for name, own in members.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(own)


if "verl" not in sys.modules:
    _install()


@dataclass
class FakeEngine:
    """The part of verl's engines that a step of three channels calls; two rows to a microbatch."""

    model: Any
    rate: float
    forwards: int = 0
    engine_config: Any = field(
        default_factory=lambda: SimpleNamespace(
            use_remove_padding=False,
            use_dynamic_bsz=True,
            max_token_len_per_gpu=128,
            micro_batch_size_per_gpu=None,
        )
    )

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        yield

    def get_data_parallel_size(self) -> int:
        return 1

    def optimizer_zero_grad(self) -> None:
        self.model.zero_grad()

    def optimizer_step(self) -> float:
        with torch.no_grad():
            for weights in self.model.parameters():
                if weights.grad is not None:
                    weights -= self.rate * weights.grad
        return 1.0

    def infer_batch(self, data: Any, loss_function: Any = None) -> Any:
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)

    @recorded("forward_backward_batch")
    def forward_backward_batch(
        self: Any, data: Any, loss_function: Any, forward_only: bool = False
    ) -> Any:
        data["batch_num_tokens"], data["dp_size"] = int(data["loss_mask"].values().sum()), 1
        logprobs: list[Tensor] = []
        metrics: dict[str, list[float]] = {}
        for batch in _microbatches(data):
            self.forwards += 1
            output, loss, own = self._forward(batch, loss_function)
            logprobs += output["log_probs"].detach().unbind()
            for name, value in own.items():
                metrics.setdefault(name, []).append(value)
            if not forward_only:
                loss.backward()
        whole = torch.nested.as_nested_tensor(logprobs, layout=torch.jagged)
        return {"model_output": {"log_probs": whole}, "metrics": metrics}

    def _forward(self, batch: Any, loss_function: Any) -> Any:
        rows = batch["input_ids"].unbind()
        logits = torch.cat(
            [self.model(input_ids=one[None], use_cache=False).logits[0] for one in rows]
        )
        offsets = batch["input_ids"].offsets()
        values: dict[str, Tensor] = {}
        if batch.get("distillation_use_topk"):
            values = loss_function(student_logits=logits.unsqueeze(0), data=batch)
            assert all(one.shape == (1, len(logits)) for one in values.values())
        ids = batch["input_ids"].values().roll(-1)
        values["log_probs"] = logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
        output = {
            name: torch.nested.nested_tensor_from_jagged(one.reshape(-1), offsets)
            for name, one in values.items()
        }
        if loss_function is None:
            return output, None, {}
        return output, *loss_function(model_output=output, data=batch, dp_group=None)


def _microbatches(data: Any) -> Iterator[Any]:
    columns = {name: one for name, one in data.items() if isinstance(one, Tensor)}
    count = len(columns["input_ids"])
    for at in range(0, count, 2):
        part = dict(data)
        for name, one in columns.items():
            rows = list(one.unbind())[at : at + 2]
            jagged = one.is_nested
            part[name] = (
                torch.nested.as_nested_tensor(rows, layout=torch.jagged)
                if jagged
                else torch.stack(rows)
            )
        yield part


def actor_config() -> Any:
    """What a policy loss and `ppo_loss` read of verl's ActorConfig."""
    return SimpleNamespace(
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        loss_agg_mode="token-mean",
        policy_loss={"loss_mode": "composer_grpo"},
        global_batch_info={},
    )
