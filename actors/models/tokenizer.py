"""The tokenizer of a model folder, with its chat template."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:  # imported where it is used: it takes seconds at each controller start
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer with its chat template; raises ValueError where it has none."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False
    )
    if not tokenizer.chat_template:
        raise ValueError(
            f"{folder} has no chat template: use an instruction-tuned model, or put a "
            "chat_template.jinja beside its tokenizer"
        )
    return cast("PreTrainedTokenizerFast", tokenizer)
