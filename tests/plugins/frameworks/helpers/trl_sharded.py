"""Both further channels on a model sharded by FSDP2 over two ranks, against the whole model.

    python -m torch.distributed.run --nproc-per-node 2 trl_sharded.py

accelerate shards on accelerators alone, so the model is sharded as it does, without it. Only the
first rank has hints and pairs; the second takes part in its forwards.
"""

import copy
import random
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from learning import config
from step_batches import own_logprobs, sampled_trace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM

from composer_mesh.actors.learning.sdpo_channel import SdpoChannel
from composer_mesh.configs.preference import WeightedPreferenceConfig
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.plugins.frameworks.trl.channels import Captured, FurtherChannels, share_forwards
from composer_mesh.plugins.frameworks.trl.parts import ChannelPart
from composer_mesh.rollouts.alignment import hinted_view
from composer_mesh.rollouts.batches import PairSample

SDPO, REPLAY = SdpoConfig(alpha=0.5), WeightedPreferenceConfig(beta=0.3)


def model() -> Any:
    torch.manual_seed(0)
    sizes = config().policy
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=300,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=2,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            tie_word_embeddings=True,
        )
    )


def part_of(rank: int, trace: Any) -> ChannelPart:
    rng = random.Random(5)
    views = [hinted_view(trace, 0, [11, 12, 13], [7, 8])] if rank == 0 else []
    pairs = [
        PairSample(f"p{n}", [1, 2, n], [3, 4, 5], [rng.randrange(300)], (-9.0, -7.0))
        for n in range(2 if rank == 0 else 0)
    ]
    tokens = len(trace.turns[0].action_ids)
    return ChannelPart([views], pairs, tokens, 2, True, True)


def loss_of(wrapped: Any, part: ChannelPart, trace: Any, sharded: bool, ranks: int) -> Any:
    """A policy term and both channels of one microbatch, padded on the left as TRL does."""
    ids = torch.tensor([[0, 0, *trace.token_ids()]])
    inputs = {"prompt_ids": ids[:, :3], "prompt_mask": torch.tensor([[0, 0, 1]])}
    mask = torch.tensor([[0, 0, *[1] * len(trace.token_ids())]])
    captured = Captured(wrapped)
    with captured.open():
        logits = wrapped(input_ids=ids, attention_mask=mask, use_cache=False).logits
    channels = FurtherChannels(
        SDPO, REPLAY, reference=lambda: nullcontext(wrapped), sharded=sharded
    )
    figures: dict[str, float] = {}
    channel = SdpoChannel(SDPO, 1)
    extra = channels.loss(wrapped, captured.take(), inputs, part, channel, figures)
    return logits.log_softmax(-1)[:, 5:, 9].sum() + ranks * extra, figures


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = model().train()
    trace = sampled_trace(whole, random.Random(3), "t")
    assert own_logprobs(whole, trace.token_ids()).isfinite().all()
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(sharded, mesh=mesh, reshard_after_forward=True)
    share_forwards(sharded)
    for step in range(2):  # the second time weights have been gathered and freed before
        loss, figures = loss_of(sharded, part_of(rank, trace), trace, True, ranks)
        loss.backward()
        total = torch.zeros(())
        for one in range(ranks):
            own, expected = loss_of(whole, part_of(one, trace), trace, False, ranks)
            total = total + own / ranks
            if one == rank:
                assert figures.keys() == expected.keys(), (figures, expected)
                for name, value in expected.items():
                    assert abs(figures[name] - value) < 1e-5, (name, figures[name], value)
        total.backward()
        for (name, ours), theirs in zip(
            sharded.named_parameters(), whole.parameters(), strict=True
        ):
            assert ours.grad is not None, name
            found = ours.grad.full_tensor()
            torch.testing.assert_close(
                found, theirs.grad, atol=1e-5, rtol=1e-4, msg=f"{step} {name}"
            )
        sharded.zero_grad()
        whole.zero_grad()
    dist.barrier()
    dist.destroy_process_group()


main()
