"""Quality filters for preference pairs before training, applied in configured order.

A pair is dropped and counted by the first filter that it fails. Filters with a side look at
`chosen_text` or `rejected_text`; special characters of a well-formed tool call are counted in its
values only, because JSON punctuation says nothing about quality. Two pairs are duplicates if
context and both actions are equal (as for votes: `actions`). Two are near-duplicates if the chosen
action is equal and the wording similar, so tasks that differ only in numbers stay distinct.

Similarity of wording is that of character shingles by MinHash: the Jaccard similarity is estimated
from `permutations` hash values with a standard error of at most 0.5 / sqrt(permutations). Hashes
are fixed, so the same texts in the same order give the same results on every machine.
"""

import hashlib
import json
import re
import unicodedata
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from composer_mesh.configs.replay import (
    ExactDuplicatesFilter,
    FilterConfig,
    LengthFilter,
    NearDuplicatesFilter,
    Side,
    SpecialCharactersFilter,
    WordsFilter,
)
from composer_mesh.rollouts.consensus import canonical_action
from composer_mesh.rollouts.pairs import PreferencePair
from composer_mesh.rollouts.tool_calls import ToolCall, normal_form, parse_action, text_before_calls
from composer_mesh.rollouts.traces import Message

if TYPE_CHECKING:
    from datasketch import MinHash

MISSED = 0.01
"""Largest probability that the index misses a text whose similarity equals the threshold."""
_CHUNK = 8192
_BASE = np.uint64(0x9E3779B97F4A7C15)
_SCHEME = "affine32"
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff]"
)
"""Characters of scripts without spaces between words: Thai to Khmer, kana, Han."""


@dataclass(frozen=True, slots=True)
class Filtered:
    """Pairs that passed, in order, and the number of pairs that each filter dropped.

    A filter is named by its type; the second filter of a type is `length_2`, and so on.
    """

    kept: list[PreferencePair]
    dropped: dict[str, int]


class _Filter(Protocol):
    def __call__(self, pair: PreferencePair) -> bool:
        """Return whether a pair passes; duplicate filters also record the pair."""


class PairFilters:
    """Configured filters with the state of their duplicate detection; one object per run."""

    def __init__(self, configs: Sequence[FilterConfig]) -> None:
        names = _names(configs)
        self._filters = {name: _filter(of) for name, of in zip(names, configs, strict=True)}

    def keep(self, pairs: Sequence[PreferencePair]) -> Filtered:
        """Filter pairs; the order of pairs matters to the duplicate filters."""
        kept, dropped = [], dict.fromkeys(self._filters, 0)
        for pair in pairs:
            failed = self._failed(pair)
            if failed is None:
                kept.append(pair)
            else:
                dropped[failed] += 1
        return Filtered(kept, dropped)

    def remember(self, pairs: Sequence[PreferencePair]) -> None:
        """Record pairs that an earlier process of the run kept, in their order."""
        for pair in pairs:
            for passes in self._filters.values():
                passes(pair)

    def _failed(self, pair: PreferencePair) -> str | None:
        return next((name for name, passes in self._filters.items() if not passes(pair)), None)


def word_count(text: str) -> int:
    """Count words between white space; in scripts without spaces each character is a word."""
    spaced, unspaced = _UNSPACED.subn(" ", text)
    return len(spaced.split()) + unspaced


def special_ratio(text: str) -> float:
    """Return the share of characters other than letters (with marks), digits and white space."""
    special = sum(1 for char in text if not (char.isalnum() or char.isspace() or _is_mark(char)))
    return special / len(text) if text else 0.0


def _is_mark(char: str) -> bool:
    """Return whether a character is part of a letter: a vowel sign, an accent, a joiner."""
    return unicodedata.category(char)[0] == "M" or char in "\u200c\u200d"


def action_content(text: str) -> str:
    """Return an action's content: of a tool call the name and values, without JSON punctuation."""
    action = parse_action(text)
    if not isinstance(action, ToolCall):
        return text
    words = [text_before_calls(text), action.name, *_leaves(action.arguments)]
    return " ".join(" ".join(words).split())


def _leaves(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += [part for item in value.items() for part in item][::-1]
        elif isinstance(value, list):
            waiting += value[::-1]
        else:
            yield str(value)


def _filter(config: FilterConfig) -> _Filter:
    match config:
        case LengthFilter():
            return _between(config.sides, len, config.min, config.max)
        case WordsFilter():
            return _between(config.sides, word_count, config.min, config.max)
        case SpecialCharactersFilter():
            return _between(config.sides, _call_ratio, 0, config.max_ratio)
        case ExactDuplicatesFilter():
            return _ExactDuplicates()
        case NearDuplicatesFilter():
            return _NearDuplicates(config)


def _names(configs: Sequence[FilterConfig]) -> list[str]:
    types = [config.type for config in configs]
    before = [types[:place].count(of) for place, of in enumerate(types)]
    return [f"{of}_{n + 1}" if n else of for of, n in zip(types, before, strict=True)]


def _call_ratio(text: str) -> float:
    return special_ratio(action_content(text))


def _between(
    sides: Sequence[Side], measure: Callable[[str], float], least: float, most: float
) -> _Filter:
    def passes(pair: PreferencePair) -> bool:
        texts = {"chosen": pair.chosen_text, "rejected": pair.rejected_text}
        return all(least <= measure(texts[side]) <= most for side in sides)

    return passes


class _ExactDuplicates:
    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def __call__(self, pair: PreferencePair) -> bool:
        mark = _mark(
            [_without_ids(message) for message in pair.messages],
            canonical_action(pair.chosen_text).name,
            canonical_action(pair.rejected_text).name,
        )
        known = mark in self._seen
        self._seen.add(mark)
        return not known


class _NearDuplicates:
    """Near-duplicate filter over the task, the last message and both actions."""

    def __init__(self, config: NearDuplicatesFilter) -> None:
        self._texts = NearDuplicates(
            config.threshold, config.shingle, config.permutations, config.window
        )

    def __call__(self, pair: PreferencePair) -> bool:
        question = next((m for m in pair.messages if m.get("role") == "user"), None)
        read = [question] if question is not None else []
        read += [m for m in pair.messages[-1:] if m is not question]
        texts = [_content(message) for message in read]
        wording = "\n".join([*texts, pair.chosen_text, pair.rejected_text])
        return not self._texts.seen(wording, _topic(pair, wording))


def _topic(pair: PreferencePair, wording: str) -> bytes:
    """Return what near-duplicates must share: the action, or the numbers in a words answer."""
    chosen = canonical_action(pair.chosen_text)
    if chosen.kind == "words":
        return _mark("words", re.findall(r"\d+", wording))
    return _mark(chosen.name)


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else json.dumps(content)


def _without_ids(message: Message) -> Message:
    """Return a message without its call ids, which differ between equal conversations."""
    plain = {key: value for key, value in message.items() if key not in ("tool_call_id",)}
    calls = plain.get("tool_calls")
    if calls:
        plain["tool_calls"] = [{**call, "id": ""} for call in calls]
    return plain


def _mark(*parts: Any) -> bytes:
    raw = json.dumps(parts, sort_keys=True).encode()
    return hashlib.blake2b(raw, digest_size=16).digest()


class NearDuplicates:
    """Index of the last `window` texts that were not near-duplicates of earlier ones."""

    def __init__(self, threshold: float, shingle: int, permutations: int, window: int) -> None:
        # The library takes a second to import; runs without this filter skip that.
        from datasketch import MinHash, MinHashLSH

        self._threshold, self._shingle, self._window = threshold, shingle, window
        self._empty = MinHash(permutations, seed=1, hashfunc=int, scheme=_SCHEME)
        shape = index_shape(threshold, permutations)
        self._index = MinHashLSH(threshold, permutations, params=shape)
        self._signatures: dict[int, MinHash] = {}
        self._order: deque[int] = deque()
        self._names = count()

    def seen(self, text: str, topic: bytes) -> bool:
        """Return whether a text is a near-duplicate within its topic; if not, index it."""
        signature = self._signature(text, topic)
        for name in self._index.query(signature):
            if signature.jaccard(self._signatures[name]) >= self._threshold:
                return True
        self._remember(signature)
        return False

    def _remember(self, signature: "MinHash") -> None:
        if len(self._order) == self._window:
            oldest = self._order.popleft()
            self._index.remove(oldest)
            del self._signatures[oldest]
        name = next(self._names)
        self._index.insert(name, signature)
        self._signatures[name] = signature
        self._order.append(name)

    def _signature(self, text: str, topic: bytes) -> "MinHash":
        signature: MinHash = self._empty.copy()
        found = shingles(text, self._shingle)
        for start in range(0, len(found), _CHUNK):
            signature.update_batch(found[start : start + _CHUNK].tolist())
        # Texts of different topics then share no hash value, so the index never compares them.
        signature.hashvalues ^= np.uint32(zlib.crc32(topic))
        return signature


def shingles(text: str, size: int) -> NDArray[np.uint32]:
    """Hash all runs of `size` characters; case and the amount of white space are ignored."""
    plain = " ".join(normal_form("NFKC", text).casefold().split())
    raw = plain.encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(raw, dtype="<u4").astype(np.uint64)
    size = max(1, min(size, len(codes)))
    starts = len(codes) - size + 1
    hashes = np.zeros(starts, dtype=np.uint64)
    for offset in range(size if starts > 0 else 0):
        hashes = hashes * _BASE + codes[offset : offset + starts]
    return np.unique((hashes ^ (hashes >> np.uint64(32))).astype(np.uint32))


def index_shape(threshold: float, permutations: int) -> tuple[int, int]:
    """Return the bands and rows of the index: the fewest bands that miss at most `MISSED`.

    Two texts collide if all values of one band are equal: with b bands of r values, a pair of
    similarity t is missed with probability (1 - t^r)^b.
    """
    for rows in range(permutations // 2, 1, -1):
        bands = permutations // rows
        if (1 - threshold**rows) ** bands <= MISSED:
            return bands, rows
    return permutations, 1
