"""Generation methods for one model: the embedded engine, `generate`, continuous batching.

Each answers prompts with the same number of sampled tokens, one thread, temperature 1, and checks
the count. Measures nothing.
"""

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from composer_mesh.actors.engines.embedded import EmbeddedEngine
from composer_mesh.actors.models.policy import build_model
from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.rollouts.generation import GenerationRequest

Prompts = list[list[int]]
Way = Callable[[Prompts, int], None]
"""Answers prompts with a given number of tokens each."""

ROWS, CONTEXT = 64, 512
PAD = 1


@dataclass(frozen=True)
class Size:
    """Dimensions of a model as built by `actors.models.policy`."""

    name: str
    layers: int
    width: int
    heads: int
    vocabulary: int


TINY = Size("tiny", layers=2, width=128, heads=4, vocabulary=512)
SMALL = Size("small", layers=4, width=256, heads=8, vocabulary=4096)


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer attributes that `build_model` needs."""

    size: int
    eos_token_id: int | None = None
    pad_token_id: int = PAD

    def __len__(self) -> int:
        return self.size


def model_of(size: Size) -> Any:
    """Build a model with fixed weights; each method gets its own, because some modify theirs."""
    config = PolicyConfig(
        hidden_size=size.width,
        intermediate_size=3 * size.width,
        layers=size.layers,
        heads=size.heads,
        kv_heads=size.heads // 2,
        head_dim=32,
        max_context=CONTEXT,
    )
    vocabulary: Any = _Vocabulary(size.vocabulary)
    model = build_model(config, vocabulary, seed=0).eval()
    model.set_attn_implementation("sdpa")
    return model


def prompts_of(size: Size, requests: int, longest: int, seed: int) -> Prompts:
    """Return prompts of random ids, 16 to `longest` each."""
    rng = random.Random(seed)
    return [
        [rng.randrange(2, size.vocabulary) for _ in range(rng.randint(16, longest))]
        for _ in range(requests)
    ]


def embedded(size: Size) -> Way:
    """Return our engine's method, with log-probs and versions; requests join as a batch."""
    engine = EmbeddedEngine(model_of(size), ROWS, CONTEXT)

    def answer(prompts: Prompts, new: int) -> None:
        done: list[Any] = []
        for seed, prompt in enumerate(prompts):
            engine.submit(GenerationRequest(str(seed), prompt, new, 1.0, seed, []), done.append)
        while engine.busy:
            engine.step()
        assert [len(result.logprobs) for result in done] == [new] * len(prompts)

    return answer


def generate(size: Size, *, cache: str) -> Way:
    """Return the method of transformers' `generate` over one batch padded on the left."""
    model = model_of(size)

    @torch.inference_mode()
    def answer(prompts: Prompts, new: int) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[PAD] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.arange(width) >= width - torch.tensor([[len(prompt)] for prompt in prompts])
        output = model.generate(
            input_ids=ids,
            attention_mask=mask.long(),
            max_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            cache_implementation=cache,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, width:]
        assert tokens.shape == (len(prompts), new)
        scores = torch.stack(output.scores, 1).log_softmax(-1)
        assert len(scores.gather(-1, tokens[..., None]).tolist()) == len(prompts)

    return answer


@contextmanager
def continuous(size: Size) -> Iterator[Way]:
    """Yield transformers' warm continuous batching, which answers from its own thread."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=-1, pad_token_id=PAD
    )
    settings = ContinuousBatchingConfig(
        num_blocks=256, page_size=64, max_batch_tokens=512, return_logprobs=True
    )
    with model_of(size).continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=settings
    ) as manager:

        def answer(prompts: Prompts, new: int) -> None:
            manager.add_requests(prompts, max_new_tokens=new)
            waiting = len(prompts)
            while waiting:
                result = manager.get_result(timeout=300)
                assert result is not None, "continuous batching has not answered in 300 s"
                if result.is_finished():
                    assert len(result.generated_tokens) == new, result.error
                    waiting -= 1

        yield answer
