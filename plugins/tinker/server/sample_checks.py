"""Checks a request for samples before it is accepted."""

from __future__ import annotations

import numpy as np

from composer_mesh.configs.serve import ServeConfig
from composer_mesh.plugins.tinker.server.requests import Sample
from composer_mesh.plugins.tinker.server.sampling_lane import target_ids
from composer_mesh.plugins.tinker.server.training_data import DataLimits, check_tokens
from composer_mesh.services.web.errors import bad


def check_sample(request: Sample, data: DataLimits, limits: ServeConfig) -> None:
    """Raise `Refused` for what cannot be sampled or scored."""
    ids = np.asarray(request.prompt.ids, np.int64)
    check_tokens(ids, "prompt", data.vocabulary, data.context - 1)
    most = request.sampling_params.max_tokens
    if most is not None and len(ids) + most > data.context:
        raise bad(
            f"the prompt has {len(ids)} tokens and max_tokens is {most}, but the context "
            f"{data.context}: lower max_tokens"
        )
    if request.num_samples > limits.max_samples:
        raise bad(f"num_samples is {request.num_samples}: ask for at most {limits.max_samples}")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if getattr(request, name) > limits.max_top_k:
            raise bad(f"{name} is {getattr(request, name)}: ask for at most {limits.max_top_k}")
    if request.prompt_alt_tokens_k:
        raise bad("prompt_alt_tokens_k is not served: ask for topk_prompt_logprobs")
    last = request.prompt_logprobs_last_n
    if last is not None and not (request.prompt_logprobs and last < len(ids)):
        raise bad(
            f"prompt_logprobs_last_n is {last}: ask for prompt_logprobs too, and for at most "
            f"{len(ids) - 1}"
        )
    _check_targets(request, len(ids), data, limits)
    stops = (*request.sampling_params.stop_ids,)
    if any(not 0 <= one < data.vocabulary for one in stops):
        raise bad(f"stop has ids beyond {data.vocabulary - 1}: mend them")


def _check_targets(request: Sample, tokens: int, data: DataLimits, limits: ServeConfig) -> None:
    targets = request.target_prompt_logprobs
    if targets is None:
        return
    wide = max((targets.shape or [0])[1:], default=0)
    if wide > limits.max_top_k:
        raise bad(
            f"target_prompt_logprobs has {wide} ids a position: ask for at most {limits.max_top_k}"
        )
    found = target_ids(targets, tokens)
    if found.size and not (found.min() >= -1 and found.max() < data.vocabulary):
        raise bad(f"target_prompt_logprobs has ids beyond {data.vocabulary - 1}: mend them")
