"""Compares two tokenizers: whether token ids of one mean the same to a model with the other.

Chat templates are not compared: token ids travel between models, text does not.
"""

from typing import Any

_SHOWN = 60
PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ttabs\t\tand\n\n\nnew lines \r\n at the end ",
    "0 7 42 1234567890 3.14159 1,000,000 1e-9 007",
    "ÄÖÜ ß naïve café e\u0301 \u00bd ﬁ Ⅳ",
    "日本語のテキスト 한국어 العربية עברית ไทย हिन्दी",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 \ud7ff \ufeff \u00a0 \u200b",
    'def f(x: int) -> str:\n    return f"{x!r}"  # ~!@#$%^&*()_+-=[]{}|;:,.<>?/\\',
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, null]}}\n</tool_call>',
    "<think>\nso\n</think>\n\n<|im_start|>user\nhi<|im_end|>\n<|endoftext|><s></s><pad>",
    "I'm you're WE'LL don't  can't",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" * 4,
)
"""Texts of many scripts, digits, spaces and controls, on which tokenizers differ if they do."""


def difference(policy: Any, other: Any) -> str:
    """Return the first difference of two tokenizers in words, about `other`; "" if there is none.

    They are equal if they have the same tokens, ids and special ids, and encode `PROBES` alike.
    """
    return _of_ids(policy, other) or _of_special_ids(policy, other) or _of_probes(policy, other)


def _of_ids(policy: Any, other: Any) -> str:
    own, theirs = policy.get_vocab(), other.get_vocab()
    differing = [token for token in {**own, **theirs} if own.get(token) != theirs.get(token)]
    if not differing:
        return ""
    none = 1 << 62
    ids = {one: (own.get(one, none), theirs.get(one, none)) for one in differing}
    token = min(differing, key=lambda one: (min(ids[one]), ids[one][1]))
    return (
        f"has {len(theirs)} tokens and the policy's {len(own)}, {len(differing)} of them different:"
        f" {_shown(token)} is {_id(theirs.get(token))} there and {_id(own.get(token))} here"
    )


def _of_special_ids(policy: Any, other: Any) -> str:
    for name in ("bos_token_id", "eos_token_id"):
        own, theirs = getattr(policy, name), getattr(other, name)
        if own != theirs:
            return f"has {name} {theirs}, and the policy's has {own}"
    own, theirs = set(policy.all_special_ids), set(other.all_special_ids)
    for number in sorted(own ^ theirs):
        here, there = ("is", "is not") if number in own else ("is not", "is")
        return f"says that id {number} {there} special, which it {here} for the policy's"
    return ""


def _of_probes(policy: Any, other: Any) -> str:
    for probe in PROBES:
        own, theirs = (one.encode(probe, add_special_tokens=False) for one in (policy, other))
        if own != theirs:
            at = next(
                (n for n, (a, b) in enumerate(zip(own, theirs, strict=False)) if a != b),
                min(len(own), len(theirs)),
            )
            return (
                f"encodes {_shown(probe)} as {len(theirs)} ids and the policy's as {len(own)}, "
                f"different from id number {at} on"
            )
        if (text := policy.decode(own)) != (read := other.decode(own)):
            return f"decodes the ids of {_shown(text)} as {_shown(read)}"
    return ""


def _id(found: int | None) -> str:
    return "no token" if found is None else f"id {found}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
