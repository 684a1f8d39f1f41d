"""Checks that a folder holds a whole causal language model, before any process is started.

Reads the names, types and shapes of the weights from the headers of their files, and of the weights
only whether they are finite. Loads neither torch nor transformers. The tokenizer and its chat
template are only looked for here; they are tried in `actors.models.template_process`.

The weights of a folder of at most `WHOLE_BYTES` are read completely, in pieces: about 1 s a
gigabyte, if the disk is as fast. Of a larger one the first `SAMPLE_BYTES` of each tensor are read:
the weights of a training that has diverged are not finite from the first value on.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from composer_mesh.configs.errors import ConfigError, one_line
from composer_mesh.configs.paths import POLICY_KEY
from composer_mesh.configs.policy import ModelSizes
from composer_mesh.configs.regular_files import open_regular, read_regular
from composer_mesh.planning.model_sizes import UnknownSizes, decoder_weights, read_sizes

Shapes = dict[str, tuple[int, ...]]

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
TEMPLATE = "chat_template.jinja"
OTHER_TEMPLATES = ("chat_template.json", "additional_chat_templates")
ADAPTER = "adapter_config.json"
FOREIGN_KEYS = ("transformers_weights", "fusion_config")
ROPE_KEYS = ("rope_scaling", "rope_parameters")
PER_LAYER = "intermediate_size"
"""May be a list with a number for each layer, as in Gemma 3n."""
LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope", "su"})
MOST_FILES = 10_000
MOST_JSON_BYTES = 1 << 26
MOST_TEMPLATE_BYTES = 1 << 20
AGAIN = "download or export the model again"
OTHER_TOKENIZER = "give a teacher of the policy's model family, or set sdpo.teacher to 'ema'"


WHOLE_BYTES = 16 << 30
SAMPLE_BYTES = 1 << 20
PIECE_BYTES = 1 << 24
_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F8_E5M2": ("u1", 0x7C),
}
"""The bits of an exponent, all of which are set in what is not finite."""


class UnfitModelFolder(ConfigError):
    """A model folder that no run can use: the file, what is wrong, the repair, the config's key."""

    def __init__(self, where: str, why: str, repair: str = AGAIN, key: str = POLICY_KEY) -> None:
        super().__init__(where, why, repair, key)

    def __str__(self) -> str:
        return one_line(f"{self.args[3]}: {self.args[0]} {self.args[1]}: {self.args[2]}")

    def at(self, key: str) -> "UnfitModelFolder":
        """Return the error for a folder that another key of the config names."""
        where, why, repair, _ = self.args
        return UnfitModelFolder(where, why, repair, key)


def check_model_folder(folder: Path, *, weights_later: bool = False) -> None:
    """Raise `UnfitModelFolder` unless a run could load the model that a folder describes.

    With `weights_later` the weights may be missing.
    """
    _only_regular_files(folder)
    found = _object(folder / CONFIG)
    _nothing_else_is_loaded(folder, found)
    _layers_fit(folder / CONFIG, found)
    _positions_fit(folder / CONFIG, found)
    _tokenizer_is_there(folder)
    weights = None if weights_later and not has_weights(folder) else folder_weights(folder)
    if weights is not None:
        _weights_are_finite(folder)
        _layers_have_weights(folder / CONFIG, found, len(weights))
    if found.get("quantization_config") is not None:
        why = "has a quantization_config, but weights are trained in float32"
        raise UnfitModelFolder(str(folder / CONFIG), why, "give the model in its full precision")
    try:
        sizes = read_sizes(folder)
    except UnknownSizes:  # other decoders may be loaded, but their weights are not known here
        return
    if weights is not None:
        _compare(folder, sizes, weights)


def has_weights(folder: Path) -> bool:
    """Whether all files of a folder's weights are there; raises `UnfitModelFolder`."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return (folder / WEIGHTS).exists()
    return all((folder / name).exists() for name in {*_indexed(folder / INDEX).values()})


def _only_regular_files(folder: Path) -> None:
    try:
        for number, path in enumerate(folder.iterdir()):
            if number >= MOST_FILES:
                why = f"has more than {MOST_FILES} files"
                raise UnfitModelFolder(str(folder), why, "give the folder of one model")
            if not path.is_file() and not path.is_dir():
                why = "is neither a file nor a folder that can be reached"
                raise UnfitModelFolder(str(path), why, f"remove it, or {AGAIN}")
    except OSError as error:
        raise _unreadable(folder, error) from None


def _nothing_else_is_loaded(folder: Path, config: dict[str, Any]) -> None:
    """Refuse what makes transformers load other weights than the folder's."""
    if (folder / ADAPTER).exists():
        why = f"has {ADAPTER}, so transformers would load adapters onto another model"
        raise UnfitModelFolder(str(folder), why, "merge the adapters, or remove the file")
    for key in FOREIGN_KEYS:
        if config.get(key) is not None:
            why = f"has {key}, by which transformers would load something else"
            raise UnfitModelFolder(str(folder / CONFIG), why, f"remove {key}")


def _object(path: Path, most: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        found = json.loads(read_regular(path, most))
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError) as error:
        raise UnfitModelFolder(str(path), f"is not JSON ({str(error)[:200]})") from None
    if not isinstance(found, dict):
        raise UnfitModelFolder(str(path), f"holds a {type(found).__name__} and not a JSON object")
    return found


def _unreadable(path: Path, error: OSError) -> UnfitModelFolder:
    return UnfitModelFolder(str(path), f"cannot be read ({error.strerror or error})")


def _layers_fit(path: Path, config: dict[str, Any]) -> None:
    """Refuse sizes that are no counts, before something is built of them."""
    if not isinstance(config.get("model_type"), str):
        raise UnfitModelFolder(str(path), "has no model_type")
    text = config.get("text_config")
    for table in (config, text if isinstance(text, dict) else {}):
        for key in ModelSizes.model_fields:
            if key.startswith(("hidden", "intermediate", "num", "vocab")) and key in table:
                value = table[key]
                for one in value if key == PER_LAYER and isinstance(value, list) else [value]:
                    _count(path, key, one)


def _layers_have_weights(path: Path, config: dict[str, Any], tensors: int) -> None:
    """Refuse more layers than tensors, before that many layers are built."""
    text = config.get("text_config")
    for table in (config, text if isinstance(text, dict) else {}):
        layers = table.get("num_hidden_layers", 0)
        if layers > tensors:
            why = f"has {layers} layers but its files hold {tensors} tensors"
            raise UnfitModelFolder(str(path), why)


def _positions_fit(path: Path, config: dict[str, Any]) -> None:
    """Refuse rotary positions whose frequencies depend on the longest sequence of a batch."""
    text = config.get("text_config")
    for table in (config, text if isinstance(text, dict) else {}):
        for key in ROPE_KEYS:
            for kind in sorted(_rope_types(table.get(key)) & LENGTH_DEPENDENT_ROPES):
                why = (
                    f"has {key} of type {kind}, whose log-probabilities depend on the longest "
                    "sequence of a batch, so that sampling and training differ"
                )
                raise UnfitModelFolder(str(path), why, "give a model with linear, llama3 or yarn")


def _rope_types(rope: object) -> set[str]:
    """Return the types that a rope table names, directly or for each type of layer."""
    if not isinstance(rope, dict):
        return set()
    inner = [table for table in rope.values() if isinstance(table, dict)]
    named = [table.get(key) for table in (rope, *inner) for key in ("rope_type", "type")]
    return {name for name in named if isinstance(name, str)}


def _count(path: Path, key: str, value: object) -> None:
    of_experts = "expert" in key
    if value is None and (of_experts or key == "num_key_value_heads"):
        return
    least = 0 if of_experts else 1  # files of dense models may name 0 experts
    if type(value) is not int or not least <= value < 1 << 31:
        most = (1 << 31) - 1
        why = f"has {key} = {str(value)[:60]}, but it is a whole number from {least} to {most}"
        raise UnfitModelFolder(str(path), why)


def _tokenizer_is_there(folder: Path) -> None:
    if not any((folder / name).is_file() for name in TOKENIZERS):
        why = f"has no tokenizer: none of {', '.join(TOKENIZERS)} is there"
        raise UnfitModelFolder(str(folder), why, "put the model's tokenizer into it")
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    found = {name: _object(folder / name) for name in names if (folder / name).exists()}
    if (folder / TEMPLATE).exists():
        _text(folder / TEMPLATE)
    elif not found.get("tokenizer_config.json", {}).get("chat_template") and not any(
        (folder / name).exists() for name in OTHER_TEMPLATES
    ):
        why = "has no chat template"
        repair = (
            "use an instruction-tuned model, or put a chat_template.jinja next to its tokenizer"
        )
        raise UnfitModelFolder(str(folder), why, repair)


def _text(path: Path) -> None:
    try:
        read_regular(path, MOST_TEMPLATE_BYTES).decode("utf-8")
    except OSError as error:
        raise _unreadable(path, error) from None
    except ValueError as error:
        raise UnfitModelFolder(str(path), f"is not UTF-8 ({error})") from None


def folder_weights(folder: Path) -> Shapes:
    """Return the shape of every tensor of a folder's weights; raises `UnfitModelFolder`."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return _header(folder / WEIGHTS)
    files = _indexed(folder / INDEX)
    held = {name: _header(folder / name) for name in sorted(set(files.values()))}
    for tensor, name in files.items():
        if tensor not in held[name]:
            raise UnfitModelFolder(str(folder / name), f"has no {tensor}, which {INDEX} names")
    return {tensor: shape for shapes in held.values() for tensor, shape in shapes.items()}


def _weights_are_finite(folder: Path) -> None:
    """Raise `UnfitModelFolder` for NaN and infinity in the weights that `folder_weights` finds."""
    whole = (folder / WEIGHTS).exists() or not (folder / INDEX).exists()
    names = {WEIGHTS} if whole else {*_indexed(folder / INDEX).values()}
    try:
        for path, tensor in not_finite(folder / name for name in sorted(names)):
            why = f"has values like NaN in {tensor[:80]!r}"
            repair = "give a checkpoint from before its training diverged, or the model again"
            raise UnfitModelFolder(str(path), why, repair)
    except UnfitModelFolder:
        raise
    except OSError as error:
        raise _unreadable(folder, error) from None


def _indexed(path: Path) -> Mapping[str, str]:
    """Return the file of each tensor that an index names."""
    table = _object(path)
    found = table.get("weight_map")
    if not isinstance(found, dict) or not found:
        raise UnfitModelFolder(str(path), "has no weight_map")
    if not isinstance(table.get("metadata"), dict):
        raise UnfitModelFolder(str(path), "has no metadata, without which it is not loaded")
    for name in found.values():
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
            why = f"names {str(name)[:80]!r}, which is not a file next to it"
            raise UnfitModelFolder(str(path), why)
    return found


def _header(path: Path) -> Shapes:
    """Return the shape of each tensor in a file, whose header describes all of it."""
    try:
        open_regular(path).close()
        with safe_open(path, framework="numpy") as file:
            names = file.keys()
            return {name: tuple(file.get_slice(name).get_shape()) for name in names}
    except FileNotFoundError:
        why = "is missing"
        raise UnfitModelFolder(str(path), why, f"{AGAIN}, with weights as safetensors") from None
    except OSError as error:
        raise _unreadable(path, error) from None
    except SafetensorError as error:
        raise UnfitModelFolder(str(path), f"is not a whole safetensors file ({error})") from None


def _places(file: BinaryIO) -> dict[str, tuple[str, int, int]]:
    """Return type, begin and end in bytes of each tensor in a file that `_header` accepts."""
    start = 8 + int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    places = {name: [start + at for at in one["data_offsets"]] for name, one in header.items()}
    return {name: (header[name]["dtype"], *place) for name, place in places.items()}


def not_finite(files: Iterable[Path], whole_bytes: int = WHOLE_BYTES) -> Iterator[tuple[Path, str]]:
    """Yield the file and the name of each tensor with NaN or infinity; raises OSError."""
    paths = list(files)
    sample = sum(path.stat().st_size for path in paths) > whole_bytes
    for path in paths:
        with open_regular(path) as file:
            for name, (kind, begin, end) in _places(file).items():
                stop = min(end, begin + SAMPLE_BYTES) if sample else end
                if kind in _EXPONENTS and _has_some(file, begin, stop, *_EXPONENTS[kind]):
                    yield path, name


def _has_some(file: BinaryIO, begin: int, end: int, words: str, exponent: int) -> bool:
    """Whether some word between two places of a file has an exponent of ones."""
    import numpy as np  # late: other readers of a folder's facts do without it

    file.seek(begin)
    while begin < end:
        piece = file.read(min(PIECE_BYTES, end - begin))
        if not piece:
            raise OSError("it ended while it was read")
        begin += len(piece)
        found = np.frombuffer(piece, words)
        if ((found & found.dtype.type(exponent)) == exponent).any():
            return True
    return False


def _compare(folder: Path, sizes: ModelSizes, weights: Shapes) -> None:
    """Compare the weights with those that a decoder of these sizes has."""
    held = {name.removeprefix("model."): shape for name, shape in weights.items()}
    for line in _differences(sizes, held):
        raise UnfitModelFolder(str(folder), f"has weights that do not fit its {CONFIG}: {line}")


def _differences(sizes: ModelSizes, held: Shapes) -> Iterator[str]:
    for name, shape in decoder_weights(sizes):
        if name not in held:
            yield f"{name} is missing"
        elif held[name] != shape:
            yield f"{name} is {list(held[name])} but {list(shape)} there"
