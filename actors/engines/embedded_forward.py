"""Runs packed tokens through a Hugging Face model, by a code path verified at engine start.

A model whose own forward only calls its layers in sequence has them called directly, which saves
the overhead of its wrappers; any other model is called as a unit.

Attention of packed tokens over the rows of a cache, as a transformers attention function.

A forward sees all its tokens as one sequence without padding: first one token of each decoding row,
then the runs of tokens that extend rows. Only attention distinguishes the sequences. A model with
this attention function behaves as with "sdpa" for other callers.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from composer_mesh.actors.engines.kv_cache import RowCache
from composer_mesh.actors.engines.port import LogitsNotFinite
from composer_mesh.actors.models.attention_calls import MORE
from composer_mesh.actors.models.expert_routing import KEYWORD, ExpertRouting, routers_of
from composer_mesh.actors.models.language_model import counts_along_rows, layer_kinds
from composer_mesh.actors.models.level_cache import RowPositions, cache_argument
from composer_mesh.actors.models.probes import WINDOW, error_of, probe_ids, short_scales
from composer_mesh.planning.model_facts import FULL, SLIDING
from composer_mesh.planning.model_refusals import ModelNotServed

NAME = "composer_mesh_rows"


@dataclass(slots=True)
class TokenRun:
    """Tokens `start` to `end` of a row; the row already holds what precedes them."""

    row: int
    start: int
    end: int
    bias: Tensor | None = None


@dataclass(slots=True)
class ForwardLayout:
    """Layout of one forward's tokens: those of rows 0 to `decoding` - 1, then the runs.

    Valid for one forward: the first layer computes what its layers share.
    """

    cache: RowCache
    decoding: int
    runs: list[TokenRun]
    positions: Tensor
    """Position of each token in its row `[tokens]`, on the model's device."""
    longest: int
    """Length of the longest decoding row, including its new token."""
    ragged: bool
    """Whether decoding rows have different lengths."""
    _bias: Tensor | None = field(default=None, init=False)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float | None
    ) -> Tensor:
        """Store keys and values; return `[tokens, heads, width]` of a query `[heads, tokens, D]`.

        `key` and `value` are `[kv_heads, tokens, D]`.
        """
        keys, values = self.cache.write(layer, key, value)
        parts = [self._decode(query, keys, values, scale)] if self.decoding else []
        at = self.decoding
        for run in self.runs:
            here = slice(at, at := at + run.end - run.start)
            if run.start:
                parts.append(_continue(run, query[:, here], keys, values, scale))
            else:
                parts.append(_begin(query[:, here], key[:, here], value[:, here], scale))
        # Models may take views of it, as of what transformers' own functions return.
        return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts)

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, scale: float | None) -> Tensor:
        """Batch query heads that share keys as queries of one head, which avoids key copies."""
        rows, heads = self.decoding, len(query)
        if self.ragged and self._bias is None:
            here = torch.arange(self.longest, device=query.device)
            allowed = here <= self.positions[:rows, None]
            self._bias = _bias(allowed, query.dtype)[:, None, None]
        output = scaled_dot_product_attention(
            query[:, :rows].transpose(0, 1).reshape(rows, keys.shape[1], -1, query.shape[2]),
            keys[:rows, :, : self.longest],
            values[:rows, :, : self.longest],
            attn_mask=self._bias,
            scale=scale,
        )
        return output.reshape(rows, heads, -1)


def _begin(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """Attend causally among a row's first tokens."""
    output = scaled_dot_product_attention(
        query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=True
    )
    return output[0].transpose(0, 1)


def _continue(
    run: TokenRun, query: Tensor, keys: Tensor, values: Tensor, scale: float | None
) -> Tensor:
    """Attend from new tokens of a row also to its earlier ones."""
    heads, tokens, width = query.shape
    groups = keys.shape[1]
    if run.bias is None:
        here = torch.arange(run.end, device=query.device)
        allowed = here <= here[run.start :, None]
        run.bias = _bias(allowed, query.dtype).repeat(heads // groups, 1)
    output = scaled_dot_product_attention(
        query.reshape(1, groups, -1, width),
        keys[run.row, None, :, : run.end],
        values[run.row, None, :, : run.end],
        attn_mask=run.bias,
        scale=scale,
    )
    return output.reshape(heads, tokens, -1).transpose(0, 1)


def _bias(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(
        ~allowed, float("-inf")
    )


def rows_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: ForwardLayout | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of a forward with `packed=`; without it, transformers' "sdpa".

    Raises ValueError for a sliding window that is shorter than a row, and for caps and sinks.
    """
    if packed is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
    if sliding_window is not None and sliding_window < packed.cache.length:
        raise ValueError(
            f"attention looks back {sliding_window} tokens but a row has {packed.cache.length}"
        )
    if unsupported := [name for name in MORE if others.get(name) is not None]:
        raise ValueError(f"attention has {', '.join(unsupported)}")
    return packed.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(NAME, rows_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest allowed root mean square error of a position's logits, in their standard deviations.

For lower precisions 0.1, or twice the error of the model's own cache. The largest single error
would grow with the vocabulary.
"""

PROBE = 24
"""Number of tokens with which a model is verified, if rows of the cache are that long."""


class PackedForward:
    """Logits of packed tokens; raises `ModelNotServed` for models that it gets wrong.

    Raises `LogitsNotFinite` for weights of which nothing can be sampled.
    """

    def __init__(self, model: Any, cache: RowCache, version: int = 0) -> None:
        self._model, self._cache, self._routers = model, cache, routers_of(model)
        self._in_place = counts_along_rows(model.config)
        self._base: Any = getattr(model, model.base_model_prefix, None)
        self.device = next(model.parameters()).device
        self.direct = False
        with torch.inference_mode():
            self._prove(version)

    def __call__(self, packed: ForwardLayout, tokens: Tensor, keep: Tensor | None) -> Tensor:
        """Return float32 logits `[kept, V]` of ids `[tokens]`: at indices `keep`, None for all."""
        run = self._through_layers if self.direct else self._whole
        if not self._routers:
            return run(packed, tokens, keep).float()
        routing = ExpertRouting()
        logits = run(packed, tokens, keep, **{KEYWORD: routing}).float()
        self._cache.write_experts(routing.all_chosen())
        return logits

    def _whole(
        self, packed: ForwardLayout, tokens: Tensor, keep: Tensor | None, **more: Any
    ) -> Tensor:
        if self._in_place:
            more |= cache_argument(self._model, RowPositions(packed.positions))
        output = self._model(
            input_ids=tokens[None],
            position_ids=packed.positions[None],
            # A 4-D mask is used unmodified by transformers; attention reads `packed` instead.
            attention_mask=torch.zeros(1, 1, 1, 1, device=tokens.device),
            use_cache=False,
            logits_to_keep=0 if keep is None else keep,
            packed=packed,
            **more,
        )
        return output.logits[0]

    def _through_layers(
        self, packed: ForwardLayout, tokens: Tensor, keep: Tensor | None, **more: Any
    ) -> Tensor:
        base, positions = self._base, packed.positions[None]
        hidden = base.embed_tokens(tokens[None])
        angles = base.rotary_emb(hidden, positions)
        for layer in base.layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=positions,
                position_embeddings=angles,
                use_cache=False,
                packed=packed,
                **more,
            )
        hidden = base.norm(hidden)
        logits: Tensor = self._model.lm_head(hidden if keep is None else hidden[:, keep])
        return logits[0]

    def _prove(self, version: int) -> None:
        """Compare with the model's own logits for a prompt, a continuation and a decoded token."""
        name = type(self._model).__name__
        if others := set(layer_kinds(self._model.config)) - {FULL, SLIDING}:
            raise ModelNotServed(name, f"it has layers of {', '.join(sorted(others))}")
        ids = probe_ids(self._model.config, min(PROBE, self._cache.length))
        tokens = torch.tensor(ids, device=self.device)
        with short_scales(self._model, kept=(WINDOW,)):
            self._compare(tokens, name, version)

    def _compare(self, tokens: Tensor, name: str, version: int) -> None:
        wanted = self._model(input_ids=tokens[None], use_cache=False).logits[0].float()
        try:
            self._model.set_attn_implementation(NAME)
            served = self._probe(tokens)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ModelNotServed(name, f"{type(error).__name__}: {error}") from error
        if not (served.isfinite().all() and wanted.isfinite().all()):
            raise LogitsNotFinite("the first forward", version)
        errors, spread = (served - wanted).square().mean(-1).sqrt(), wanted.std()
        distance, allowed = error_of(errors, self._model), TOLERANCE.get(self._model.dtype, 0.1)
        away = float(distance / spread)
        if self._model.dtype not in TOLERANCE and away > allowed:
            own = (self._in_parts(tokens) - wanted).square().mean(-1).sqrt()
            allowed = max(allowed, 2 * float(error_of(own, self._model) / spread))
        if not distance <= allowed * spread:  # all logits of weights that diverged may be equal
            raise ModelNotServed(
                name,
                f"with its keys in rows a position's logits are {away:.2g} standard deviations "
                f"from its own, as a root mean square, and {allowed:.2g} are allowed",
            )
        self.direct = not self._in_place and self._layers_suffice(tokens, served)
        way = "layer by layer" if self.direct else "by its own forward"
        logger.info("the embedded engine calls %s %s", name, way)

    def _probe(self, tokens: Tensor) -> Tensor:
        """Return logits `[tokens, V]`: most start row 0, some continue it, the last is decoded."""
        logits, count = [], len(tokens)
        for start, end in _parts(count):
            positions = torch.arange(start, end, device=self.device)
            self._cache.aim(torch.stack([torch.zeros_like(positions), positions]))
            decoding = int(end == count)
            runs = [] if decoding else [TokenRun(0, start, end)]
            packed = ForwardLayout(
                self._cache, decoding, runs, positions, longest=end, ragged=False
            )
            logits.append(self(packed, tokens[start:end], None))
        return torch.cat(logits)

    def _in_parts(self, tokens: Tensor) -> Tensor:
        """Return the model's own logits `[tokens, V]` of the same parts, by its own cache."""
        logits, cache = [], DynamicCache(config=self._model.config)
        given = cache_argument(self._model, cache)
        for start, end in _parts(len(tokens)):
            ids = tokens[None, start:end]
            logits.append(self._model(input_ids=ids, use_cache=True, **given).logits[0].float())
        return torch.cat(logits)

    def _layers_suffice(self, tokens: Tensor, served: Tensor) -> bool:
        """Whether calling the layers gives the same bits as the model's own forward."""
        self.direct = True
        try:
            return torch.equal(self._probe(tokens), served)
        except (AttributeError, KeyError, TypeError, ValueError):
            return False
        finally:
            self.direct = False


def _parts(count: int) -> Iterator[tuple[int, int]]:
    """Yield first and last place of a probe's parts: a prompt, a continuation, a decoded token."""
    yield from pairwise((0, count * 5 // 8, count - 1, count))
