"""Model folders as strangers may have made them, by seed: a tiny model, broken in some way."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broken_files import Breaker

CONFIG, TOKENIZER, TEMPLATE = "config.json", "tokenizer.json", "chat_template.jinja"
SETTINGS = "tokenizer_config.json"

NUMBERS: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 3, 7, 2**20, 2**31 - 1, 2**31, 2**63, 10**40, 1.5, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "4", "", [], {}, [2], {"a": 1}),
)
KEYS = (
    *("model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "hidden_act"),
    *("max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "layer_types", "dtype"),
    *("rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "num_experts"),
    *("num_experts_per_tok", "n_routed_experts", "eos_token_id", "pad_token_id", "text_config"),
    *("attention_bias", "initializer_range", "max_window_layers", "use_sliding_window"),
)
TYPES = (
    *("llama", "mixtral", "qwen3_moe", "gpt2", "t5", "bert", "mamba", "gemma3", "deepseek_v3"),
    *("no_such_model", "../qwen3", "qwen3\n\x1b[31m", "\ud800", "x" * 5000, "bloom", "whisper"),
)
EXTRA: tuple[dict[str, Any], ...] = (
    {"auto_map": {"AutoModelForCausalLM": "stolen.Model"}, "model_type": "stolen"},
    {"auto_map": {"AutoConfig": "../../stolen.Config"}, "trust_remote_code": True},
    {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
    {"transformers_weights": "../../../etc/passwd"},
    {"fusion_config": {"x": 1}},
    {"text_config": {"num_hidden_layers": 10**9}},
    {"text_config": {"text_config": {"model_type": "qwen3"}}, "model_type": "gemma3"},
    {"layer_types": ["full_attention"] * 100_000},
    {"layer_types": ["sliding_attention", "no_such_attention"]},
    {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    {"rope_parameters": {"rope_type": "no_such_rope"}},
    {"num_hidden_layers": 10**6},
    {"num_hidden_layers": 10**6, "model_type": "olmo2"},
    {"num_experts": 2**30, "model_type": "qwen3_moe"},
    {"max_position_embeddings": 10**9, "model_type": "gpt2", "n_positions": 10**9},
    {"_attn_implementation": "kernels-community/stolen"},
    {"attn_implementation": "stolen/kernel"},
    {"is_encoder_decoder": True},
    {"vocab_size": 5},
    {"x" * 1_000_000: "y" * 9_000_000},
)
TEMPLATES = (
    "",
    "{{ messages }",
    "{% for i in range(10**9) %}{{ i }}{% endfor %}",
    "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}",
    "{% macro a(n) %}{{ a(n) }}{{ a(n) }}{% endmacro %}{{ a(1) }}",
    "{{ 'x' * 10**10 }}",
    "{{ ('x' * 10**8) | upper | reverse }}",
    '{% set n = namespace(x="x") %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}',
    "{{ raise_exception('no') }}",
    "{{ raise_exception('line\nline\x1b[31m\u2028line') }}",
    "{{ messages.__class__.__mro__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ ''.__class__.__base__.__subclasses__() }}",
    "{{" + "(" * 20_000 + "1" + ")" * 20_000 + "}}",
    "{% if true %}" * 5_000 + "{% endif %}" * 5_000,
    "{% include '/etc/passwd' %}",
    "{% import 'x' as x %}",
    "{{ undefined_name.attribute }}",
    "{{ messages | tojson }}",
    "{{ messages[0].content }}",
    "{{ strftime_now('%Y' * 10**7) }}",
    "\ufeff{{ messages }}\u202e\u0000",
    "x" * 900_000,
    "x" * 2_000_000,
    "{{ 2 ** (2 ** 40) }}",
    "{{ 10 ** 10 ** 8 }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ range(10**12) | list }}",
)
REGEXES = ("(a+)+$", "(a|aa)+b", "(?=(a+))+b", "(" * 5_000 + ")" * 5_000, "[", "(?P<x>a)\\1{9999}")
INDEX_NAMES: tuple[Any, ...] = (
    *("../outside.safetensors", "/etc/passwd", "a/../../b", "", ".", "\0", None, 5, "x\ny"),
    *("missing.safetensors", "pytorch_model.bin", CONFIG),
)


class HostileModels:
    """Breaks the copy of a whole model folder; `marker` is made if something planted is run."""

    def __init__(self, whole: Path, marker: Path) -> None:
        self._whole, self._marker = whole, marker

    def make(self, seed: int, folder: Path) -> str:
        """Write the folder of a seed; return how it was broken."""
        rng = random.Random(seed)
        shutil.copytree(self._whole, folder)
        ways: list[Callable[[random.Random, Path], None]] = [
            *(self._number, self._number, self._type, self._extra, self._template, self._template),
            *(self._tokenizer, self._setting, self._index, self._pickled, self._missing),
            *(self._header, self._any_file, self._any_file),
        ]
        done = rng.choices(ways, k=rng.choice((1, 1, 1, 2)))
        for way in done:
            try:
                way(rng, folder)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue  # an earlier way has broken what this one would change
        return ", ".join(way.__name__ for way in done)

    def _number(self, rng: random.Random, folder: Path) -> None:
        _set(folder / CONFIG, {rng.choice(KEYS): rng.choice(NUMBERS)})

    def _type(self, rng: random.Random, folder: Path) -> None:
        _set(folder / CONFIG, {"model_type": rng.choice(TYPES)})

    def _extra(self, rng: random.Random, folder: Path) -> None:
        _set(folder / CONFIG, rng.choice(EXTRA))
        attack = f"import os\nos.mkdir({str(self._marker)!r})\n"
        (folder / "stolen.py").write_text(attack)

    def _template(self, rng: random.Random, folder: Path) -> None:
        text = rng.choice(TEMPLATES)
        (folder / TEMPLATE).write_bytes(text.encode("utf-8", "surrogatepass"))

    def _tokenizer(self, rng: random.Random, folder: Path) -> None:
        table = json.loads((folder / TOKENIZER).read_bytes())
        change = rng.randrange(8)
        vocabulary = table["model"]["vocab"]
        if change == 0:
            table["pre_tokenizer"] = _splitting(rng.choice(REGEXES))
        elif change == 1:
            table["model"]["merges"].append(["no", "such"])
        elif change == 2:
            vocabulary["far"] = rng.choice([10**6, 2**31, 2**40, -1, 1.5])
        elif change == 3:
            vocabulary["long" * 2_500_000] = len(vocabulary)
        elif change == 4:
            table["added_tokens"] = rng.choice([None, [{}], [{"id": 5}], [[]] * 9])
        elif change == 5:
            table["normalizer"] = _replacing(rng.choice(REGEXES))
        elif change == 6:
            table["model"] = rng.choice([None, {}, {"type": "Unigram"}, {"type": "x"}, []])
        else:
            table["post_processor"] = {"type": "TemplateProcessing", "single": [], "pair": []}
        (folder / TOKENIZER).write_text(json.dumps(table))

    def _setting(self, rng: random.Random, folder: Path) -> None:
        key = rng.choice(["eos_token", "tokenizer_class", "auto_map", "chat_template", "pad_token"])
        values: list[Any] = [None, 5, [], {}, "x", "<|no|>", "../x", {"default": "{{ x"}, "\x1b[0m"]
        values += [
            {"AutoTokenizer": ["stolen.Tokenizer", None]},
            [{"name": "default"}],
            "y" * 10**7,
        ]
        if key == "chat_template":
            (folder / TEMPLATE).unlink()
        _set(folder / SETTINGS, {key: rng.choice(values)})

    def _index(self, rng: random.Random, folder: Path) -> None:
        weights = folder / "model.safetensors"
        names = json.loads(_header(weights)[0])
        names.pop("__metadata__", None)
        weights.rename(folder / "model-1.safetensors")
        files: dict[str, Any] = dict.fromkeys(names, "model-1.safetensors")
        for name in rng.sample(sorted(files), rng.choice([0, 1, len(files)])):
            files[name] = rng.choice(INDEX_NAMES)
        told = rng.choice([{"weight_map": files}, {"weight_map": files, "metadata": 5}, files])
        (folder / "model.safetensors.index.json").write_text(json.dumps(told))

    def _pickled(self, rng: random.Random, folder: Path) -> None:
        weights = folder / "model.safetensors"
        Breaker(rng, self._marker).plant_pickle(weights)
        if rng.random() < 0.5:
            weights.rename(folder / "pytorch_model.bin")

    def _missing(self, rng: random.Random, folder: Path) -> None:
        path = rng.choice(sorted(folder.iterdir()))
        path.unlink()
        if rng.random() < 0.5:
            path.symlink_to(rng.choice(["/no/such/file", "/dev/zero", path.name, "..", "/etc"]))

    def _header(self, rng: random.Random, folder: Path) -> None:
        weights = folder / "model.safetensors"
        told, rest = _header(weights)
        table = json.loads(told)
        name = rng.choice(sorted(set(table) - {"__metadata__"}))
        change = rng.randrange(6)
        if change == 0:
            table.pop(name)
        elif change == 1:
            table[f"{name}.other"] = table.pop(name)
        elif change == 2:
            table[name]["shape"] = [*reversed(table[name]["shape"]), 1]
        elif change == 3:
            table[name]["dtype"] = rng.choice(["I32", "U32", "F16", "x"])
        elif change == 4:
            table[name]["shape"] = [2**62, 0]
        else:
            table["\x1b[31m\n" + "z" * 100_000] = table.pop(name)
        text = json.dumps(table).encode()
        weights.write_bytes(len(text).to_bytes(8, "little") + text + rest)

    def _any_file(self, rng: random.Random, folder: Path) -> None:
        Breaker(rng, self._marker).break_one(folder)


def _set(path: Path, values: dict[str, Any]) -> None:
    table = json.loads(path.read_bytes())
    path.write_text(json.dumps({**table, **values}), encoding="utf-8")


def _header(path: Path) -> tuple[bytes, bytes]:
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    return content[8:end], content[end:]


def _splitting(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _replacing(pattern: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": "aa"}


def forked(program: Callable[[int], None]) -> tuple[bytes, int]:
    """Run a program in a copy of this process; return what it wrote, and its exit status."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            program(writing)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read()
    return said, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
