"""Runs packed tokens through a Hugging Face model, by a code path verified at engine start.

A model whose own forward only calls its layers in sequence has them called directly, which saves
the overhead of its wrappers; any other model is called as a unit.
"""

import logging
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.engines.embedded_attention import NAME, Packed, Run
from composer_mesh.actors.engines.kv_cache import RowCache
from composer_mesh.actors.engines.port import LogitsNotFinite
from composer_mesh.actors.models.expert_routing import KEYWORD, ExpertRouting, routers_of
from composer_mesh.actors.models.language_model import counts_along_rows, layer_kinds
from composer_mesh.actors.models.level_cache import RowPositions
from composer_mesh.actors.models.probes import WINDOW, error_of, probe_ids, short_scales
from composer_mesh.planning.model_facts import FULL, SLIDING
from composer_mesh.planning.model_refusals import ModelNotServed

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
"""Largest allowed root mean square error of a position's logits, in their standard deviations.

0.1 for lower precisions. The largest single error would grow with the vocabulary.
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

    def __call__(self, packed: Packed, tokens: Tensor, keep: Tensor | None) -> Tensor:
        """Return float32 logits `[kept, V]` of ids `[tokens]`: at indices `keep`, None for all."""
        run = self._through_layers if self.direct else self._whole
        if not self._routers:
            return run(packed, tokens, keep).float()
        routing = ExpertRouting()
        logits = run(packed, tokens, keep, **{KEYWORD: routing}).float()
        self._cache.write_experts(routing.all_chosen())
        return logits

    def _whole(self, packed: Packed, tokens: Tensor, keep: Tensor | None, **more: Any) -> Tensor:
        if self._in_place:
            more["past_key_values"] = RowPositions(packed.positions)
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
        logits: Tensor = output.logits[0]
        return logits

    def _through_layers(
        self, packed: Packed, tokens: Tensor, keep: Tensor | None, **more: Any
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
                past_key_values=None,
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
        if not distance <= allowed * spread:  # all logits of weights that diverged may be equal
            raise ModelNotServed(
                name,
                f"with its keys in rows a position's logits are {away:.2g} standard deviations "
                f"from its own, as a root mean square, and {allowed:g} are allowed",
            )
        self.direct = not self._in_place and self._layers_suffice(tokens, served)
        way = "layer by layer" if self.direct else "by its own forward"
        logger.info("the embedded engine calls %s %s", name, way)

    def _probe(self, tokens: Tensor) -> Tensor:
        """Return logits `[tokens, V]`: most start row 0, some continue it, the last is decoded."""
        logits, count = [], len(tokens)
        for start, end in pairwise((0, count * 5 // 8, count - 1, count)):
            positions = torch.arange(start, end, device=self.device)
            self._cache.aim(torch.stack([torch.zeros_like(positions), positions]))
            decoding = int(end == count)
            runs = [] if decoding else [Run(0, start, end)]
            packed = Packed(self._cache, decoding, runs, positions, longest=end, ragged=False)
            logits.append(self(packed, tokens[start:end], None))
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
