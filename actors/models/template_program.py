"""The program of `template_process`: loads a model folder within limits, and answers requests.

    {"check": {"tools", "hints", "chat"}} -> {"facts"} or {"error"}
    {"teacher_of": folder or null}   -> {"facts"} or {"error"}
    {"messages", "options"}  -> {"text"}, {"refused"} or {"error"}

One line each. It knows nothing of a run. A request that exceeds its CPU time ends the process.
"""

import json
import os
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jinja2 import TemplateError

import composer_mesh.actors.models.quiet_torchao  # noqa: F401
from composer_mesh.actors.models.tokenizer import PANIC, chat_settings, difference, load_tokenizer
from composer_mesh.rollouts.chat import ChatFormat
from composer_mesh.rollouts.chat_checks import check_chat

MOST_TEXT, MOST_GROWTH = 1 << 22, 4
"""A rendering has at most so many characters, and so many times those of its messages."""

_SAMPLES = ("a" * 20_000, " " * 20_000, "1" * 20_000, "a!" * 10_000, "é\u0301\U0001f600\n" * 4_000)
"""Texts on which a tokenizer with runaway patterns would take its time."""


def main(folder: Path, limits: Mapping[str, int], requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until there are no more."""
    tokenizer: Any = None
    for line in requests:
        request = json.loads(line)
        if tokenizer is None:
            import transformers  # before the limits, as it is no stranger's

            transformers.logging.disable_progress_bar()
            _limit(limits["load_cpu_s"], limits["load_bytes"])
        try:
            if tokenizer is None:
                tokenizer, answer = _loaded(folder)
            if tokenizer is not None:
                answer = _answered(folder, tokenizer, request, limits)
        except BaseException as error:  # noqa: BLE001 a panic is no `Exception`
            answer = _panic_answer(error)
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _panic_answer(error: BaseException) -> dict[str, Any]:
    """Return the answer to a panic of a tokenizer's native code; raises every other error."""
    if type(error).__name__ != PANIC:
        raise error
    return {"error": f"has a tokenizer that fails ({_line(error)})"}


def _loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    try:
        tokenizer = load_tokenizer(folder)
        for text in _SAMPLES:
            tokenizer.encode(text, add_special_tokens=False)
    except Exception as error:  # noqa: BLE001 whatever a stranger's file raises is the answer
        return None, {"error": f"has a tokenizer that cannot be loaded ({_line(error)})"}
    return tokenizer, {}


def _answered(
    folder: Path, tokenizer: Any, request: dict[str, Any], limits: Mapping[str, int]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "check" in request or "teacher_of" in request:
        found = describe_model(folder, len(tokenizer))
    if "error" in found:
        return found
    if "teacher_of" in request:
        _limit(limits["load_cpu_s"], limits["load_bytes"])
        return found | _compared(tokenizer, request["teacher_of"])
    _limit(limits["render_cpu_s"], limits["render_bytes"])
    try:
        if "check" in request:
            return _checked(found["facts"], folder, tokenizer, **request["check"])
        text = tokenizer.apply_chat_template(request["messages"], **request["options"])
        most = MOST_TEXT + MOST_GROWTH * len(json.dumps(request["messages"]))
        if not isinstance(text, str) or len(text) > most:
            return {"error": f"writes more than {most} characters"}
        return {"text": text}
    except TemplateError as error:
        return {"refused": _line(error)}
    except Exception as error:  # noqa: BLE001 whatever a stranger's template raises is the answer
        return {"error": f"cannot be rendered ({_line(error)})"}


def describe_model(folder: Path, ids: int) -> dict[str, Any]:
    """Return what is known of the folder's model, built without its weights, or its error."""
    from composer_mesh.actors.models.model_facts import facts_of

    try:
        found = facts_of(folder)
    except Exception as error:  # noqa: BLE001 whatever a stranger's config raises is the answer
        why = _line(error).partition(". ")[0]
        return {"error": f"has a config.json of which no model can be built ({why})"}
    if why := _generation_fault(folder):
        return {"error": f"has a generation_config.json that cannot be used ({why})"}
    if "facts" in found and ids > (rows := found["facts"]["rows"]):
        return {"error": f"has a tokenizer of {ids} ids but a model that knows only {rows}"}
    return found


def _generation_fault(folder: Path) -> str:
    """Return why a folder's generation config can be neither loaded nor saved, else nothing."""
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").exists():
        return ""
    try:
        GenerationConfig.from_pretrained(folder, local_files_only=True).validate(strict=True)
    except Exception as error:  # noqa: BLE001 whatever a stranger's file raises is the answer
        return _line(error)
    return ""


def _compared(tokenizer: Any, policy: str | None) -> dict[str, Any]:
    """Compare the tokenizer with the one of a policy's folder, where the policy has one."""
    if policy is None:
        return {}
    own, answer = _loaded(Path(policy))
    if own is not None and (why := difference(own, tokenizer)):
        return {"error": f"has another tokenizer, which {why}"}
    return answer


def _checked(
    facts: dict[str, Any],
    folder: Path,
    tokenizer: Any,
    tools: list[dict[str, Any]],
    hints: bool,
    chat: dict[str, Any],
) -> dict[str, Any]:
    try:
        format = ChatFormat(tokenizer, tools, **chat_settings(folder, tokenizer, chat))
        check_chat(format, hints=hints)
        return {"facts": {**facts, "chat": format.described}}
    except Exception as error:  # noqa: BLE001 whatever a stranger's template raises is the answer
        return {"error": f"has a chat template that cannot be used ({_line(error)})"}


def _limit(cpu_s: int, more_bytes: int) -> None:
    """Limit this process to so much more CPU time and memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + cpu_s)
    _lower(resource.RLIMIT_DATA, _data_bytes() + more_bytes)


def _lower(kind: int, most: int) -> None:
    """Set the soft limit, so that the next request can set it anew."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _data_bytes() -> int:
    """Return the private memory of this process that counts against RLIMIT_DATA."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData: run it on Linux")


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


if __name__ == "__main__":
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    main(Path(sys.argv[1]), json.loads(sys.argv[2]), sys.stdin.buffer, out)
