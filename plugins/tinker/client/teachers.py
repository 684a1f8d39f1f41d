"""Scores given ids with samplers: a teacher's top-k log-probs, and log-probs of a reference.

All requests are sent before the first answer is waited for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from tinker import types

from composer_mesh.plugins.tinker.client.sequences import Hinted, Pair, TeacherTopK


def teacher_topk(sampler: Any, turns: Sequence[Hinted], k: int) -> list[Hinted]:
    """Return hinted turns with a teacher's `k` most probable ids at each token of their answers.

    `sampler` is a SamplingClient: of the trained weights for SDPO, or of any with their tokenizer.
    """
    asked = [_ask(sampler, one, k) for one in turns]
    return [
        replace(one, teacher=_rows(future.result(), one))
        for one, future in zip(turns, asked, strict=True)
    ]


def _ask(sampler: Any, one: Hinted, k: int) -> Any:
    return sampler.sample(
        prompt=types.ModelInput.from_ints(one.view.teacher_ids),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=k,
    )


def _rows(found: Any, one: Hinted) -> TeacherTopK:
    """Return what is most probable at each id of the answer: what row r says of the id at r + 1."""
    rows = [found.topk_prompt_logprobs[row + 1] for row in one.view.teacher_rows]
    ids = np.array([[token for token, _ in row] for row in rows], np.int64)
    logprobs = np.array([[logprob for _, logprob in row] for row in rows], np.float32)
    return TeacherTopK(ids, logprobs)


def with_reference(sampler: Any, pairs: Sequence[Pair]) -> list[Pair]:
    """Return pairs with the log-probs of their answers under a frozen SamplingClient."""
    asked = [
        [sampler.compute_logprobs(types.ModelInput.from_ints(ids)) for ids, _, _ in pair.sides]
        for pair in pairs
    ]
    found = []
    for pair, futures in zip(pairs, asked, strict=True):
        chosen, rejected = (future.result()[len(pair.context) :] for future in futures)
        found.append(replace(pair, chosen_logprobs=chosen, rejected_logprobs=rejected))
    return found
