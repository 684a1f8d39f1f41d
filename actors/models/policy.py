"""The policy as a folder in Hugging Face format: built small from a config, or any causal LM.

Every actor loads its copy by `load_model`, however the folder was made.

transformers holds some tensors otherwise than checkpoints do: it fuses the experts of a layer, and
renames. What it converted while reading a folder `CheckpointNames` converts back, by its own rules,
so that vLLM and checkpoints get the names of the folder. It reads headers of files, never weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import Tensor

from composer_mesh.actors.models.attention_calls import IMPLEMENTATIONS, attention_calls, computing
from composer_mesh.actors.models.tokenizer import load_tokenizer
from composer_mesh.configs.policy import PolicyConfig
from composer_mesh.mesh.progress import made_progress
from composer_mesh.planning.model_facts import AttentionCall
from composer_mesh.planning.model_folder import UnfitModelFolder, folder_weights

if TYPE_CHECKING:  # imported where it is used: it takes seconds at each controller start
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

UNLOADABLE = (
    *(AttributeError, LookupError, OSError, RuntimeError, SafetensorError, TypeError),
    ValueError,
)
"""What transformers raises for folders that it cannot load."""

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PLAIN_CONTROLS = ("<tool_call>", "</tool_call>")
_PIECES = r"\d| ?[A-Za-z]+|[^A-Za-z\d\n]+|\n+"
CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\nTools:' }}
{%- for tool in tools %}{{ ' ' + tool.function.name + '(' }}
{%- for name in tool.function.parameters.properties %}{{ name }}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string
     else call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def build_tokenizer(corpus: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of at most `vocab_size` ids; digits are split, words stay intact."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )
    fast.add_tokens(list(PLAIN_CONTROLS))
    return fast


def frame(tools: list[dict[str, Any]]) -> str:
    """Return the text that the chat template itself adds, for the tokenizer's corpus."""
    signatures = [
        f"{tool['function']['name']}({', '.join(tool['function']['parameters']['properties'])})"
        for tool in tools
    ]
    return f"system\nTools: {' '.join(signatures)}\nuser\nassistant\ntool\n"


def build_model(config: PolicyConfig, tokenizer: PreTrainedTokenizerFast, seed: int) -> Any:
    """Build a Qwen3 model with random float32 weights that depend only on config and seed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_context,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )


def save_policy(
    model: Any, tokenizer: Any, folder: Path, state: dict[str, Tensor] | None = None
) -> None:
    """Write weights (safetensors), config, tokenizer and chat template.

    `state` replaces the model's own state dict where given.
    """
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)


def load_model(folder: Path, attention: str | None = None) -> PreTrainedModel:
    """Load the model in float32, in eval mode.

    Without a name of an attention, it is "sdpa" where that computes all that the model asks of its
    attention, else "eager".

    Raises `UnfitModelFolder` where transformers refuses the folder, or its files lack tensors of
    the model or have others.
    """
    try:
        implementation = IMPLEMENTATIONS[attention or _plain_attention(folder)]
        model, info = class_for(config_of(folder)).from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=torch.float32,
            attn_implementation=implementation,
            output_loading_info=True,
        )
    except UNLOADABLE as error:
        why = f"cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())[:500]})"
        repair = "correct what the reason names, or export the model again"
        raise UnfitModelFolder(str(folder), why, repair) from error
    made_progress(f"the model of {folder.name}")
    for what, names in (("lack", info["missing_keys"]), ("have", info["unexpected_keys"])):
        if names:
            why = f"has files that {what} {min(names)[:120]}, unlike the model of its config.json"
            raise UnfitModelFolder(str(folder), why)
    for name, weights in empty_model(folder).named_parameters():
        # transformers loads also those as trainable that the class freezes.
        model.get_parameter(name).requires_grad_(weights.requires_grad)
    return cast("PreTrainedModel", learning_every_id(model).eval())


def learning_every_id(model: Any) -> Any:
    """Let the embedding of every id have a gradient, in place; return the model.

    transformers gives that of `pad_token_id` none, which in many folders is also the end token's.
    No loss depends on padding, so that its embedding is not changed by it.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return model


def converted(model: Any, dtype: torch.dtype) -> Any:
    """Convert a model's weights, in place; return it.

    Buffers, such as the frequencies of rotary positions, keep the precision that they need.
    """
    for weights in model.parameters():
        weights.data = weights.data.to(dtype)
    return model


def attention_of(folder: Path) -> tuple[tuple[AttentionCall, ...] | None, tuple[str, ...]]:
    """Return the attention calls of a folder's model, and the implementations that compute them.

    The calls are None, and nothing is known of them, where only a model with weights shows them.
    """
    calls = attention_calls(empty_model(folder))
    found = computing(calls)
    try:
        empty_model(folder, "sdpa")
    except ValueError:  # the class has no such attention
        found = tuple(name for name in found if name != "sdpa")
    return calls, found


def _plain_attention(folder: Path) -> str:
    return "sdpa" if "sdpa" in attention_of(folder)[1] else "eager"


def empty_model(folder: Path, attention: str = "eager") -> PreTrainedModel:
    """Return a folder's model without weights, which take no memory (torch's meta device)."""
    config = config_of(folder)
    with torch.device("meta"):
        model = class_for(config).from_config(
            config, dtype=torch.float32, attn_implementation=IMPLEMENTATIONS[attention]
        )
    return cast("PreTrainedModel", learning_every_id(model).eval())


def config_of(folder: Path) -> Any:
    """Return the config of a model's folder."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def class_for(config: Any) -> Any:
    """Return transformers' class of models for text, or for images and text where it has only that.

    Of the latter what reads images is never called.
    """
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
    )

    kind = type(config)
    others = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if kind in others and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForImageTextToText
    return AutoModelForCausalLM


Named = tuple[tuple[str, ...], Tensor]
"""A tensor with all its names."""

SHOWN = 3


class CheckpointNames:
    """Converts the tensors of a folder's model to those that its files hold."""

    def __init__(self, folder: Path) -> None:
        self.model = empty_model(folder)
        read = empty_model(folder)
        self._loading_info = _loading_info(read, folder_weights(folder))
        self.model._weight_conversions = read._weight_conversions
        state = self.model.state_dict(keep_vars=True)
        self.expected = {name for name, _ in self.converted(_with_all_names(state))}

    def differences(self) -> Iterator[str]:
        """Yield why the files do not hold the model that the folder's config describes."""
        missing, unexpected = self._loading_info.missing_keys, self._loading_info.unexpected_keys
        for name, held, own in sorted(self._loading_info.mismatched_keys):
            yield f"{name} is {[*held]} but {[*own]} there"
        if missing:
            yield f"{_few(missing)} {_verb(missing)} missing"
        if unexpected:
            yield f"{_few(unexpected)} {_verb(unexpected)} unknown there"

    def converted(self, tensors: Iterable[Named]) -> Iterator[tuple[str, Tensor]]:
        """Yield each tensor of the files, under every name, in the order of the layers.

        `tensors` are those of the model in the order of its state dict. Only one layer of them is
        held at a time.
        """
        for _, layer in groupby(tensors, lambda one: _layer(one[0][0])):
            named = {name: tensor for names, tensor in layer for name in names}
            yield from _reverted(self.model, named).items()


def _loading_info(model: Any, shapes: dict[str, tuple[int, ...]]) -> Any:
    """Let transformers read tensors of these shapes, without numbers, into an empty model.

    Returns its `LoadStateDictInfo`, with the keys that are missing, unexpected or mismatched.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    here = LoadStateDictConfig(
        device_map={"": torch.device("meta")},
        dtype=torch.float32,
        weight_mapping=get_model_conversion_mapping(model),
    )
    tensors = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    info, _ = convert_and_load_state_dict_in_model(model, tensors, here)
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    return info


def _reverted(model: Any, named: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, named)


def _with_all_names(state: dict[str, Tensor]) -> Iterator[Named]:
    names: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names.setdefault(id(tensor), []).append(name)
    for together in names.values():
        yield tuple(together), state[together[0]]


def _layer(name: str) -> tuple[str, ...]:
    """Return a name up to its first number, which all tensors of a layer share."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return tuple(parts[: numbers[0] + 1]) if numbers else tuple(parts)


def _few(names: set[str]) -> str:
    shown = ", ".join(name[:120] for name in sorted(names)[:SHOWN])
    return shown if len(names) <= SHOWN else f"{shown} and {len(names) - SHOWN} more"


def _verb(names: set[str]) -> str:
    return "is" if len(names) == 1 else "are"


class ModelFolder:
    """Writes folders with the architecture of the initial policy, and its names of tensors.

    Holds the model's structure and its tokenizer but no weights, so that it may write in another
    thread while the model is trained.
    """

    def __init__(self, initial: Path) -> None:
        from transformers import GenerationConfig

        self._model, self._tokenizer = CheckpointNames(initial).model, load_tokenizer(initial)
        if (initial / "generation_config.json").exists():
            self._model.generation_config = GenerationConfig.from_pretrained(initial)

    def write(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the policy with these weights, each tensor under its first name."""
        save_policy(self._model, self._tokenizer, folder, weights)
