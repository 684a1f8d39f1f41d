"""A causal language model split into its hidden states and its linear head.

Training computes hidden states, selects the rows that count, and lets `losses.fused` apply the
head, so that the logits of a complete microbatch are never materialized. Computes no losses.

Axes: B sequences, T their padded length, H hidden size, V vocabulary, N rows.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from composer_mesh.actors.models.attention_calls import PACKED, PASSED_ON
from composer_mesh.actors.models.expert_parallel import context_of
from composer_mesh.actors.models.expert_routing import (
    KEYWORD,
    ExpertRouting,
    routers_of,
    routing_of,
)
from composer_mesh.actors.models.hidden_states import HiddenStates, Packed, PackedRow, shared_states
from composer_mesh.actors.models.probes import SCALES, error_of, probe_sequences, short_scales
from composer_mesh.actors.models.tree_masks import Chunk, Reach, attention_masks
from composer_mesh.configs.trainer import Sharing
from composer_mesh.losses.blocks import softcapped
from composer_mesh.losses.fused import linear_collision_logprobs, linear_logprobs
from composer_mesh.mesh.progress import made_progress
from composer_mesh.planning.model_facts import CHUNKED, FULL, SHARED_KINDS, SLIDING, not_shared
from composer_mesh.planning.model_refusals import (
    UnsupportedHead,
    UnsupportedPacking,
    UnsupportedRows,
    UnsupportedSharing,
)
from composer_mesh.rollouts.prefix_tree import ROW_CAPACITY, PrefixTree
from composer_mesh.rollouts.traces import ExpertChoices

STATES = "decoder_states"
States = Callable[[], HiddenStates]
PROBE_LOUDNESS = 1e3
PROBE_TOLERANCE = {torch.float64: 1e-4}
"""Largest difference by rounding in relation to the largest number, 1e-3 in other precisions."""
IN_ONE_ROW = ("flash_attention_2", "flex_attention", PACKED)
"""transformers' names of the attentions that compute what a position sees, and no more."""
MULTIPLIERS, DIVISORS = ("logit_scale", "lm_head_multiplier"), ("logits_scaling",)
"""What configs call the number by which a model scales its logits."""


class LanguageModel:
    """The hidden-state and head parts of a Hugging Face causal LM.

    With `packing`, several sequences share an input row; with `sharing`, what several of them begin
    with is computed once. Of a sharded model only `hidden`
    communicates with other ranks, so all ranks must call it equally often, in the same order; its
    head is gathered from then on until the backward. Where ranks divide the positions of a forward,
    these make all calls together. `forwards` counts those that have run.
    """

    def __init__(self, model: Any, packing: bool = False, sharing: Sharing = "off") -> None:
        self.model, self._sharing, self.forwards = model, sharing, 0
        self.routing: ExpertRouting | None = None
        self._experts: Sequence[ExpertChoices | None] = ()
        self._head = model.get_output_embeddings()
        self._packing, self._context = packing, context_of(model)
        self._decoder = decoder_call(model)

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return next(self.model.parameters()).device

    @property
    def weight(self) -> Tensor:
        """The head's weight [V, H]."""
        return self._head.weight

    @property
    def bias(self) -> Tensor | None:
        """The head's bias [V], which few models have."""
        return getattr(self._head, "bias", None)

    @property
    def softcap(self) -> float | None:
        """The cap of the head's scores, which few models have."""
        return logit_softcap(self.model.config)

    @torch.no_grad()
    def check_head(self) -> None:
        """Raise `UnsupportedHead` unless head and hidden states give the model's own logits.

        The comparison scales the head's output by a thousand: an unknown cap is nearly the identity
        on the small logits of an untrained model.
        """
        ids = padded(probe_sequences(self.model.config)[:1], self.device)
        louder = self._head.register_forward_hook(lambda *call: call[-1] * PROBE_LOUDNESS)
        try:
            own = self.model(input_ids=ids, use_cache=False).logits.float()
            apart = self._head(self.hidden(ids.tolist()).whole()).float()
            apart = softcapped(apart, self.softcap)
        finally:
            louder.remove()
        difference = float((own - apart).abs().max())
        if not is_plain(difference, own):
            raise UnsupportedHead(type(self.model).__name__, difference)

    def check_rows(self, short: bool = False) -> None:
        """Raise `UnsupportedRows` unless the states of a sequence depend on what precedes alone.

        Neither on other sequences of its microbatch, nor on what follows in its own. `short` makes
        the model's scales short meanwhile, as if the sequences were longer than them.
        """
        sequences = probe_sequences(self.model.config)
        begin, together = sequences[1], partial(self._padded, sequences)
        apart = partial(self._padded, [begin, begin])
        kept = () if short else SCALES
        difference = self._difference([begin, begin], apart, together, kept)
        if difference is not None:
            raise UnsupportedRows(type(self.model).__name__, difference)

    def check_packing(self, kept: tuple[str, ...] = ()) -> None:
        """Raise `UnsupportedPacking` unless packing leaves the hidden states unchanged.

        The model's scales are short meanwhile, except those `kept`.
        """
        sequences = probe_sequences(self.model.config)
        apart, together = (partial(way, sequences) for way in (self._padded, self._packed))
        difference = self._difference(sequences, apart, together, kept)
        if difference is not None:
            raise UnsupportedPacking(type(self.model).__name__, difference)

    def check_sharing(self) -> None:
        """Raise `UnsupportedSharing` unless shared prefixes leave the hidden states unchanged.

        Compares levels as well as one row.
        """
        name, config = type(self.model).__name__, self.model.config
        if others := ", ".join(sorted(set(layer_kinds(config)) - SHARED_KINDS)):
            raise UnsupportedSharing(name, not_shared(others))
        prompt, *ends = probe_sequences(config)
        sequences = [[*prompt, *end] for end in ends]
        for capacity in (0, ROW_CAPACITY):
            tree = PrefixTree.of(sequences, row_capacity=capacity)
            apart, together = partial(self._padded, sequences), partial(self._shared, tree)
            difference = self._difference(sequences, apart, together)
            if difference is not None:
                reason = f"hidden states with shared prefixes differ by up to {difference:.3g}"
                raise UnsupportedSharing(name, reason)

    @torch.no_grad()
    def _difference(
        self,
        sequences: Sequence[list[int]],
        apart: States,
        together: States,
        kept: tuple[str, ...] = (),
    ) -> float | None:
        """Return by how much two ways to compute sequences differ; None where only by rounding.

        The model's scales are short meanwhile, except those `kept`.
        """
        rows = padded([[True] * len(one) for one in sequences], self.device)
        with short_scales(self.model, kept):
            count, longest = rows.shape
            own, found = (way().whole()[:count, :longest][rows] for way in (apart, together))
        difference = error_of((own - found).abs().amax(-1), self.model)
        return None if is_plain(difference, own) else difference

    def hidden(
        self, sequences: Sequence[list[int]], experts: Sequence[ExpertChoices | None] = ()
    ) -> HiddenStates:
        """Return the last hidden states, normed, of some sequences.

        `experts` are those that the routers of a mixture choose for them, of the first sequences;
        None leaves the choice to it. `routing` tells what was chosen.
        """
        self._experts = experts
        if self._sharing != "off" and len(sequences) > 1:
            tree = PrefixTree.planned(sequences, self._sharing)
            if tree.pays:
                return self._shared(tree)
        by_itself = self.model.config._attn_implementation == PACKED
        if self._packing and (len(sequences) > 1 or by_itself):
            return self._packed(sequences)
        return self._padded(sequences)

    def dummy_forward(self) -> Tensor:
        """Return a zero that depends on every weight: the contribution of a rank without data."""
        ids = torch.zeros(1, 2, dtype=torch.long, device=self.device)
        return 0 * self.logprobs(self.hidden(ids.tolist()), ids, ids[:, 1:] == 0).sum()

    def _states(self, **inputs: Any) -> Tensor:
        self.forwards += 1
        states: Tensor = self._decoder(**inputs)
        made_progress("a forward of the model")
        return states

    def _shared(self, tree: PrefixTree) -> HiddenStates:
        config = self.model.config
        flex = config._attn_implementation == "flex_attention"
        return shared_states(self._states, tree, self.device, windows_of(config), blocks=flex)

    def _padded(self, sequences: Sequence[Sequence[int]]) -> HiddenStates:
        # No mask: causal attention never sees padding on the right.
        ids = padded(sequences, self.device)
        places = torch.arange(ids.numel()).view(ids.shape)
        routed = self._routed(sequences, places, ids.numel())
        return HiddenStates.padded(self._states(input_ids=ids, **routed))

    def _routed(
        self, sequences: Sequence[Sequence[int]], places: Tensor, count: int
    ) -> dict[str, Any]:
        """Return the argument by which the routers of a mixture get, and report, the experts."""
        if not routers_of(self.model):
            return {}
        self.routing = routing_of(
            sequences, self._experts, places, count, self.device, self._context
        )
        return {KEYWORD: self.routing}

    def _packed(self, sequences: Sequence[Sequence[int]]) -> HiddenStates:
        # In a single row restarts cost nothing, except where a mask of it is dense.
        how = self.model.config._attn_implementation
        context = self._context
        windows, in_place = windows_of(self.model.config), counts_along_rows(self.model.config)
        chunked = any(isinstance(one, Chunk) for one in windows.values())
        one_row = how in IN_ONE_ROW or in_place
        packed = Packed.of(sequences, self.device, one_row, context)
        inputs: dict[str, Any] = {}
        if how == PACKED:
            padding = packed.ids.numel() - sum(map(len, sequences))
            lengths = [*map(len, sequences), *[padding] * bool(padding)]
            inputs = {"attention_mask": self._no_mask, PASSED_ON: PackedRow(lengths, context)}
        elif how == "flex_attention" or chunked or in_place:
            masks = attention_masks(packed.seen, packed.seen, windows, how == "flex_attention")
            inputs = {"attention_mask": _added(masks) if how == "eager" else masks}
        inputs |= self._routed(sequences, packed.places, packed.ids.numel())
        own = slice(None) if context is None else context.own(packed.ids.numel())
        positions = packed.positions[:, own]
        inputs |= {"input_ids": packed.ids[:, own], "position_ids": positions}
        if in_place:
            from composer_mesh.actors.models.level_cache import RowPositions

            inputs["cache"] = RowPositions(positions[0])
        return packed.unpacked(self._states(**inputs), context)

    @property
    def _no_mask(self) -> Tensor:
        """A mask of four axes, which transformers hands on unchanged and nothing reads."""
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)

    def logprobs(
        self, hidden: HiddenStates, ids: Tensor, mask: Tensor, temperature: float = 1.0
    ) -> Tensor:
        """Return log-probs [B, T - 1] of each next id where the mask is True, 0 elsewhere.

        `hidden` and `ids` [B, T] are of the same sequences.
        """
        rows = hidden.predicting(mask)
        own = linear_logprobs(
            rows.states,
            self.weight,
            rows.own(ids[:, 1:][mask]),
            bias=self.bias,
            softcap=self.softcap,
            temperature=temperature,
        )
        found = rows.whole(own)
        return found.new_zeros(mask.shape).masked_scatter(mask, found)

    def collision_logprobs(self, hidden: HiddenStates, mask: Tensor) -> Tensor:
        """Log of sum p^2 [B, T - 1] of each prediction where the mask is True, 0 elsewhere."""
        rows = hidden.predicting(mask)
        own = linear_collision_logprobs(
            rows.states, self.weight, bias=self.bias, softcap=self.softcap
        )
        found = rows.whole(own)
        return found.new_zeros(mask.shape).masked_scatter(mask, found)


def is_plain(difference: float, own: Tensor) -> bool:
    """Whether a model's own logits are those of its hidden states and head, but for rounding."""
    return difference <= PROBE_TOLERANCE.get(own.dtype, 1e-3) * max(1.0, float(own.abs().max()))


def layer_kinds(config: Any) -> tuple[str, ...]:
    """Return the kinds of a model's layers, those of its text part where it has several parts."""
    text = config.get_text_config()
    kinds = tuple(getattr(text, "layer_types", None) or ())
    if not kinds and getattr(text, "sliding_window", None) is not None:
        return (SLIDING,)
    return kinds or (FULL,)


def windows_of(config: Any) -> dict[str, Reach]:
    """Return how far each kind of a model's layers looks back; None for all positions."""
    text = config.get_text_config()
    reach: dict[str, Reach] = {SLIDING: getattr(text, "sliding_window", None)}
    if CHUNKED in layer_kinds(config):
        reach[CHUNKED] = Chunk(text.attention_chunk_size)
    return {kind: reach.get(kind) for kind in layer_kinds(config)}


def counts_along_rows(config: Any) -> bool:
    """Whether layers scale queries by their index in a row, whatever their positions are."""
    return bool(getattr(config.get_text_config(), "attn_temperature_tuning", None))


def _added(masks: Any) -> Any:
    """Return dense masks as numbers that eager attention adds to its scores."""
    if isinstance(masks, dict):
        return {kind: _added(mask) for kind, mask in masks.items()}
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(masks.shape, device=masks.device).masked_fill(~masks, lowest)


def decoder_states(model: Any, cache: Any = None, **inputs: Any) -> Tensor:
    """Return the last hidden states [B, T, H] of a causal LM, before its head.

    Those of a model that scales its logits are scaled, so that the head gives its own logits.
    """
    decoder, cached = decoder_of(model), cache is not None
    if cached:
        from composer_mesh.actors.models.level_cache import cache_argument

        inputs |= cache_argument(decoder, cache)
    states: Tensor = decoder(use_cache=cached, **inputs).last_hidden_state
    scale = logit_scale(model.config)
    return states if scale == 1.0 else states * scale


def decoder_call(model: Any) -> Callable[..., Tensor]:
    """Return `decoder_states` of a model; a sharded one has its own, which gathers weights."""
    own: Callable[..., Tensor] | None = getattr(model, STATES, None)
    return own or partial(decoder_states, model)


def logit_scale(config: Any) -> float:
    """Return by what a model multiplies its logits; `check_head` proves that it does."""
    text, scale = config.get_text_config(), 1.0
    for name in MULTIPLIERS:
        scale *= getattr(text, name, None) or 1.0
    for name in DIVISORS:
        scale /= getattr(text, name, None) or 1.0
    return scale


def logit_softcap(config: Any) -> float | None:
    """Return the cap of a model's logits, None without one; `check_head` proves it."""
    softcap: float | None = getattr(config.get_text_config(), "final_logit_softcapping", None)
    return softcap or None


def decoder_of(model: Any) -> Any:
    """Return the part of a causal LM that comes before its head."""
    if model.base_model is not model:
        return model.base_model
    return next(child for child in model.children() if hasattr(child, "get_input_embeddings"))


def text_decoder_of(model: Any) -> Any:
    """Return the part of a causal LM that has its decoder layers, without other modalities."""
    return decoder_of(model).get_decoder()


def padded(rows: Sequence[Sequence[Any]], device: torch.device | None = None) -> Tensor:
    """Stack rows of numbers [B, T], padded with zeros on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)
