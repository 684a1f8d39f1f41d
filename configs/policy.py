"""The trained model: built-in sizes or a model folder, and its supervised warm start."""

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from composer_mesh.configs.base import (
    MOST_TOKENS,
    CountOrZero,
    FilePath,
    FreeTable,
    Positive,
    Section,
    Share,
)
from composer_mesh.configs.hub import ModelPath, ModelSource

MOST_WIDTH = 1_000_000
Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Layers = Annotated[int, Field(ge=1, le=10_000)]
Vocabulary = Annotated[int, Field(ge=1, le=100_000_000)]

# 256 byte tokens, the chat and tool tokens, and a few merges.
SMALLEST_VOCABULARY = 300


class WarmStartConfig(Section):
    """Supervised fine-tuning on imperfect demonstrations before the mesh starts; cached."""

    steps: CountOrZero = 300
    """Supervised optimizer steps; 0 starts from random weights."""

    batch_size: Annotated[int, Field(ge=1, le=100_000)] = 32
    """Demonstrations per supervised step."""

    lr: Positive = 2e-3
    """Peak learning rate of the supervised steps."""

    demonstrations: Annotated[int, Field(ge=1, le=10_000_000)] = 2000
    """Number of training episodes to demonstrate."""

    error_rate: Share = 0.3
    """Share of demonstrated actions that are deliberately wrong."""

    flawless_share: Share = 0.5
    """Share of the supervised steps, the first ones, that use only correct actions."""

    recovery_rate: Share = 0.5
    """Share of wrong actions after which the demonstration continues with the correct one."""

    hinted_share: Share = 0.25
    """Share of demonstrations with a hint at an error, so that the model learns to read hints."""


ToolCallFormat = Literal[
    "auto",
    "hermes",
    "qwen_xml",
    "glm",
    "harmony",
    "mistral_args",
    "mistral",
    "granite",
    "phi4",
    "cohere",
    "kimi",
    "deepseek",
    "lfm2",
    "gemma",
    "llama_json",
    "llama_pythonic",
]

RESERVED_OPTIONS = frozenset(
    {"messages", "tools", "documents", "tokenize", "add_generation_prompt", "chat_template"}
    | {"strftime_now"}
    | {"conversation", "continue_final_message", "return_tensors", "return_dict", "padding"}
    | {"truncation", "max_length", "return_assistant_tokens_mask", "tokenizer_kwargs"}
)
"""What the run itself says to a chat template, or what is no option of one."""

Decoder = Literal["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"]


class ModelSizes(Section):
    """Sizes of a decoder, under the names that its config.json uses."""

    model_type: Decoder
    """Type of the decoder: "llama", "mistral", "qwen2", "qwen3", "qwen3_moe" or "gpt_oss"."""

    hidden_size: Width
    """Width of the residual stream."""

    intermediate_size: Width
    """Width of the gated feed-forward layer; a mixture has layers of experts in its place."""

    num_experts: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Experts of each layer of a mixture; 0 for other models."""

    num_experts_per_tok: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Experts that compute each token."""

    moe_intermediate_size: Annotated[int, Field(ge=0, le=MOST_WIDTH)] = 0
    """Width of one expert; gpt_oss states it as intermediate_size."""

    num_hidden_layers: Layers
    """Decoder layers."""

    num_attention_heads: Width
    """Query heads."""

    num_key_value_heads: Width
    """Key and value heads, which several query heads may share."""

    head_dim: Annotated[int, Field(ge=0, le=MOST_WIDTH)] = 0
    """Width of one head; 0 is hidden_size / num_attention_heads."""

    vocab_size: Vocabulary
    """Rows of the embedding."""

    tie_word_embeddings: bool = False
    """Whether the output head is the embedding."""

    attention_bias: bool = False
    """Whether attention's projections have biases; in qwen2 those of q, k and v always do."""

    def _problems(self) -> Iterator[str]:
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            yield (
                f"hidden_size is {self.hidden_size} but num_attention_heads is "
                f"{self.num_attention_heads}, which does not divide it: write head_dim too"
            )
        given = (self.num_experts, self.num_experts_per_tok, self.moe_intermediate_size)
        if self.is_mixture and not all(given):
            yield (
                f"model_type is {self.model_type!r} but num_experts, num_experts_per_tok and "
                f"moe_intermediate_size are {', '.join(map(str, given))}: write all three"
            )
        if any(given) and not self.is_mixture:
            yield (
                f"model_type is {self.model_type!r}, which has no experts: remove num_experts, "
                "num_experts_per_tok and moe_intermediate_size"
            )

    @property
    def is_mixture(self) -> bool:
        """Whether its layers are mixtures of experts."""
        return self.model_type in ("qwen3_moe", "gpt_oss")

    @property
    def norms_heads(self) -> bool:
        """Whether queries and keys are normed head by head."""
        return self.model_type in ("qwen3", "qwen3_moe")


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


START = r"^(base|sft(:[^@]+(@[0-9a-f]{8})?)?)$"
"""A run writes the checkpoint of its supervised run, with the CRC-32 of that one's manifest."""


class PolicyConfig(ModelSource):
    """The policy: a built-in tiny Qwen3, or any causal LM from a folder or a hub."""

    path: ModelPath | None = None
    """Hugging Face model folder, GGUF file, or the id of a model on the hub. An id is "ORG/NAME",
    "ORG/NAME@REVISION" or "ORG/NAME:FILE.gguf"; a run pins the commit. Without it a built-in model
    of the sizes below is made."""

    start: Annotated[str, Field(pattern=START)] = "base"
    """"base": the model of this section; "sft" or "sft:DIR": the last checkpoint of the supervised
    run in runs/NAME-sft, or in DIR, that fine-tuned this model."""

    sizes: ModelSizes | None = None
    """Sizes of the model in path, as in its config.json, so that `check` can estimate memory before
    the folder exists. They are validated against the folder once it does."""

    hidden_size: Annotated[int, Field(ge=8, le=MOST_WIDTH)] = 128
    """Width of the residual stream (built-in model)."""

    intermediate_size: Annotated[int, Field(ge=8, le=MOST_WIDTH)] = 384
    """Width of the gated feed-forward layer (built-in model)."""

    layers: Layers = 2
    """Number of transformer layers (built-in model)."""

    heads: Width = 4
    """Number of query heads (built-in model)."""

    kv_heads: Width = 2
    """Number of key and value heads; divides heads (built-in model)."""

    head_dim: Annotated[int, Field(ge=2, le=MOST_WIDTH)] = 32
    """Width of one head; even, because rotary positions rotate pairs (built-in model)."""

    vocab_size: Vocabulary = 512
    """Size of the built-in tokenizer's vocabulary, including special tokens (built-in model)."""

    max_context: Annotated[int, Field(ge=16, le=MOST_TOKENS)] = 384
    """Maximum tokens of a conversation, prompt and all turns together; a full one ends."""

    tool_calls: ToolCallFormat = "auto"
    """Format in which the model writes tool calls; "auto" is the format of its chat template (model
    in path)."""

    tools_in: Literal["auto", "template", "system"] = "auto"
    """Where the model reads its tools: in its chat template's own place, or in the system message.
    "auto" is the system message if the template writes no tools (model in path)."""

    stop_tokens: Annotated[tuple[str, ...], Field(strict=False, max_length=16)] = ()
    """Tokens that end an action, in addition to the tokenizer's eos_token and those of the folder's
    generation_config.json (model in path)."""

    chat_template_options: FreeTable = Field(default_factory=dict)
    """Values that the chat template reads, such as enable_thinking (model in path)."""

    chat_date: str | None = None
    """Date that the chat template uses as today's, such as 2026-01-31. A run without one sets the
    day on which it starts, and keeps it when it is resumed (model in path)."""

    cache_dir: FilePath = Path(".cache/composer-mesh")
    """Cache of warm-started models and of converted GGUF files, shared by runs."""

    warm_start: WarmStartConfig = Field(default_factory=WarmStartConfig)
    """Supervised warm start of the built-in model."""

    @property
    def folder(self) -> Path | None:
        """Where the model in path is; None for the built-in one."""
        return None if self.path is None else self.folder_of(self.path)

    @property
    def chat(self) -> dict[str, Any]:
        """How its chat template is used, as JSON has it."""
        return {
            "stops": list(self.stop_tokens),
            "tool_calls": self.tool_calls,
            "tools_in": self.tools_in,
            "options": dict(self.chat_template_options),
            "date": self.chat_date,
        }

    def _problems(self) -> Iterator[str]:
        wrong = sorted(RESERVED_OPTIONS & self.chat_template_options.keys())
        if wrong:
            yield f"chat_template_options has {wrong[0]!r}, which the run sets itself: remove it"
        if self.chat_date is not None and not _is_date(self.chat_date):
            yield f"chat_date is {self.chat_date!r} but must be a date: write it as 2026-01-31"
        chosen = self.tool_calls != "auto" or self.tools_in != "auto" or self.chat_date
        if self.path is None and (chosen or self.stop_tokens or self.chat_template_options):
            yield (
                "tool_calls, tools_in, stop_tokens, chat_template_options or chat_date is set but "
                "path is not, and the built-in model has a format of its own: set path, or remove "
                "them"
            )
        if self.path is None:
            yield from self._built_in_problems()

    def _built_in_problems(self) -> Iterator[str]:
        if self.sizes is not None:
            yield (
                "sizes is set but path is not, and they describe the model in path: set path, or "
                "remove sizes and set hidden_size and its like for the built-in model"
            )
        if self.heads % self.kv_heads:
            yield (
                f"heads is {self.heads} but kv_heads is {self.kv_heads}, which does not divide it, "
                f"so heads cannot share keys: set kv_heads to a divisor of {self.heads}"
            )
        if self.head_dim % 2:
            yield (
                f"head_dim is {self.head_dim} but must be even, because rotary positions rotate "
                f"pairs: set it to {self.head_dim + 1}"
            )
        if self.vocab_size < SMALLEST_VOCABULARY:
            yield (
                f"vocab_size is {self.vocab_size} but the built-in tokenizer needs at least "
                f"{SMALLEST_VOCABULARY} (bytes and special tokens): raise it to "
                f"{SMALLEST_VOCABULARY} or more"
            )
