"""The sizes of a decoder model and the parameters that follow from them.

Sizes come from the built-in model's section, from a Hugging Face config.json, or from a config that
declares them before the model's folder is there. Counts only what it knows the shape of: the
decoders named in `KNOWN`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationError, model_validator

from composer_mesh.configs.base import Count, Section

Known = Literal["llama", "mistral", "qwen2", "qwen3"]
KNOWN: tuple[str, ...] = get_args(Known)


class UnknownSizes(Exception):
    """A model whose parameters cannot be counted: where it is described, and why."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)

    def __str__(self) -> str:
        return f"{self.args[0]}: {self.args[1]}"


class ModelSizes(Section):
    """Sizes of a decoder, under the names that its config.json has for them."""

    model_type: Known
    """Which decoder it is: "llama", "mistral", "qwen2" or "qwen3"."""

    hidden_size: Count
    """Width of the residual stream."""

    intermediate_size: Count
    """Width of the gated feed-forward layer."""

    num_hidden_layers: Count
    """Decoder layers."""

    num_attention_heads: Count
    """Query heads."""

    num_key_value_heads: Count
    """Key and value heads, which several query heads may share."""

    head_dim: Annotated[int, Field(ge=0)] = 0
    """Width of one head; 0 is hidden_size / num_attention_heads."""

    vocab_size: Count
    """Rows of the embedding."""

    tie_word_embeddings: bool = False
    """Whether the output head is the embedding."""

    attention_bias: bool = False
    """Whether attention's projections have biases; qwen2 always has those of q, k and v."""

    @model_validator(mode="after")
    def _heads_fit(self) -> Self:
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size is {self.hidden_size} but num_attention_heads is "
                f"{self.num_attention_heads}, which does not divide it: write head_dim too"
            )
        return self

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_width(self) -> int:
        """Numbers of all query heads of one token."""
        return self.num_attention_heads * self.head_width

    @property
    def key_width(self) -> int:
        """Numbers of all key heads of one token; the values have as many."""
        return self.num_key_value_heads * self.head_width

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head where it is another matrix."""
        return self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)

    @property
    def layer(self) -> int:
        """Parameters of one decoder layer."""
        hidden, queries, keys = self.hidden_size, self.query_width, self.key_width
        attention = hidden * queries + 2 * hidden * keys + queries * hidden + self._biases
        feed_forward = 3 * hidden * self.intermediate_size
        norms = 2 * hidden + (2 * self.head_width if self.model_type == "qwen3" else 0)
        return attention + feed_forward + norms

    @property
    def parameters(self) -> int:
        """Parameters of the model; a head that is the embedding is counted once."""
        return self.embedding + self.num_hidden_layers * self.layer + self.hidden_size

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        """Parameters of low-rank adapters on these linear layers of every decoder layer."""
        hidden, queries, keys = self.hidden_size, self.query_width, self.key_width
        ends = {"q_proj": hidden + queries, "o_proj": queries + hidden}
        ends |= dict.fromkeys(("k_proj", "v_proj"), hidden + keys)
        ends |= dict.fromkeys(
            ("gate_proj", "up_proj", "down_proj"), hidden + self.intermediate_size
        )
        return self.num_hidden_layers * rank * sum(ends.get(name, 0) for name in targets)

    @property
    def cache_numbers(self) -> int:
        """Numbers that a KV cache keeps of one token."""
        return 2 * self.num_hidden_layers * self.key_width

    @property
    def _biases(self) -> int:
        of_inputs = self.query_width + 2 * self.key_width
        if self.model_type == "qwen2":
            return of_inputs
        return (of_inputs + self.hidden_size) if self.attention_bias else 0


def read_sizes(folder: Path) -> ModelSizes:
    """The sizes of the model in a Hugging Face folder; raises `UnknownSizes`."""
    file = folder / "config.json"
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnknownSizes(str(file), f"cannot be read: {error}") from None
    if found.get("model_type") not in KNOWN:
        raise UnknownSizes(
            str(file), f"model_type is {found.get('model_type')!r}, counted are {', '.join(KNOWN)}"
        )
    found = {"num_key_value_heads": found.get("num_attention_heads")} | found
    given = {key: found[key] for key in ModelSizes.model_fields if found.get(key) is not None}
    try:
        return ModelSizes.model_validate(given)
    except ValidationError as error:
        raise UnknownSizes(str(file), f"has unfit sizes: {error.errors()[0]['msg']}") from None
