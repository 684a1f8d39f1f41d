"""Tokenizers of the kinds that published models have, trained on a chat template and some text."""

from __future__ import annotations

from functools import cache
from typing import Any

from real_templates import CONTROLS, RealTemplate, text_of
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

KINDS = ("byte-level", "metaspace-always", "metaspace-first", "metaspace-never", "wordpiece")
ORDINARY = ("  ", "    ", "        ", "\n\n", "<table>", "</table>")
"""Added tokens that are text, as Gemma's and Phi's tokenizers have them."""

CORPUS = [
    "How much is it? The price is 12 and the answer is 34.",
    "def f(x):\n        return x\n\n    y = 1\n",
    "user assistant system tool result content message question a file be brief sum 2+2 1+1",
] * 20


def trained(kind: str, text: str) -> Tokenizer:
    """Return a backend of one of `KINDS`, without added tokens but that of unknown text."""
    if kind == "byte-level":
        found = Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=letters, show_progress=False)
    elif kind == "wordpiece":
        found = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        found.normalizer = normalizers.BertNormalizer(lowercase=True)
        found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        found.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(
            vocab_size=600, special_tokens=["[UNK]"], show_progress=False
        )
    else:
        scheme = kind.removeprefix("metaspace-")
        found = Tokenizer(models.BPE(byte_fallback=True))
        found.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        marked = [] if scheme == "never" else [decoders.Strip(" ", 1, 0)]
        found.decoder = decoders.Sequence([*spaces, *marked])
        letters = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=letters, show_progress=False)
    found.train_from_iterator([*CORPUS, text], trainer)
    return found


@cache
def tokenizer_for(
    kind: str, template: str, eos: str = "<|im_end|>", bos: str = "<s>", *more: str
) -> Any:
    """Return a tokenizer with a template, the control tokens that it writes, and ordinary ones."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=trained(kind, template),
        eos_token=eos,
        bos_token=bos,
        chat_template=template,
    )
    fast.add_tokens(sorted({*CONTROLS.findall(template), *more}), special_tokens=True)
    fast.add_tokens(list(ORDINARY))
    return fast


def tokenizer_of(kind: str, template: RealTemplate) -> Any:
    """Return the tokenizer of a published template."""
    return tokenizer_for(kind, text_of(template), template.eos, template.bos, *template.stops)
