"""The protobuf messages of the Tinker protocol that this server reads and writes.

Numbers and types are those that SDKs 0.25.0 to 0.38.0 send and expect (`tinker_public` in their
`proto` folder); fields that this server ignores are left out. Built at import, without generated
code, in a pool of their own.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PACKAGE = "tinker_public"

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {
    "bytes": _FIELD.TYPE_BYTES,
    "string": _FIELD.TYPE_STRING,
    "bool": _FIELD.TYPE_BOOL,
    "double": _FIELD.TYPE_DOUBLE,
    "int32": _FIELD.TYPE_INT32,
    "int64": _FIELD.TYPE_INT64,
    "uint32": _FIELD.TYPE_UINT32,
    "enum": _FIELD.TYPE_INT32,  # the same on the wire, and unknown values stay
}

DTYPE_FLOAT32, DTYPE_INT64, DTYPE_INT32 = 1, 2, 3
STOP, LENGTH = 0, 1

# Each line: number, name, type; "*" repeated, "?" with presence, "{}" a map from text.
_MESSAGES = {
    "SparseCsr": "1 values bytes; 2 crow_indices bytes; 3 col_indices bytes",
    "Tensor": "1 dense bytes ?; 2 sparse_csr SparseCsr; 3 dtype enum; 4 shape int64 *",
    "EncodedTextChunk": "1 tokens bytes",
    "ImageChunk": "1 data bytes",
    "DmelChunk": "1 dmel bytes",
    "Chunk": "1 encoded_text EncodedTextChunk; 2 image ImageChunk; 3 dmel DmelChunk",
    "Datum": "1 model_input Chunk *; 2 loss_fn_inputs Tensor {}",
    "LossConfigValue": "1 number double ?; 2 text string ?",
    "ForwardBackwardRequest": (
        "1 model_id string; 2 seq_id int32; 3 data Datum *; 4 loss_fn string; "
        "5 loss_fn_config double {}; 6 forward_only bool; 7 loss_fn_config_v2 LossConfigValue {}"
    ),
    "BatchedTensor": "1 data bytes; 2 offsets bytes; 3 dtype enum; 4 trailing_shape int64 *",
    "ArrayRecord": "1 type_tag string; 2 fields BatchedTensor {}; 3 num_datums int64",
    "ForwardBackwardOutput": (
        "1 loss_fn_output_type string; 2 loss_fn_outputs ArrayRecord *; 3 metrics double {}"
    ),
    "TopkLogprobs": "1 token_ids bytes; 2 logprobs bytes; 3 k uint32; 4 length uint32",
    "SampledSequence": (
        "1 stop_reason enum; 2 tokens bytes; 3 logprobs bytes ?; "
        "4 topk_sampled_logprobs TopkLogprobs"
    ),
    "SampleResponse": (
        "1 sequences SampledSequence *; 2 prompt_logprobs bytes ?; "
        "3 topk_prompt_logprobs TopkLogprobs; 4 prompt_cache_hit_tokens int32; "
        "5 target_prompt_logprobs Tensor"
    ),
}


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="composer_mesh/tinker_public.proto", package=PACKAGE, syntax="proto3"
    )
    for name, lines in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in lines.split("; "):
            _add(message, *line.split())
    return file


def _add(message: Any, number: str, name: str, kind: str, mark: str = "") -> None:
    field = message.field.add(name=name, number=int(number), label=_FIELD.LABEL_OPTIONAL)
    if mark == "{}":
        entry = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        _add(entry, "1", "key", "string")
        _add(entry, "2", "value", kind)
        kind, mark = f"{message.name}.{entry.name}", "*"
    if kind in _TYPES:
        field.type = _TYPES[kind]
    else:
        field.type, field.type_name = _FIELD.TYPE_MESSAGE, f".{PACKAGE}.{kind}"
    if mark == "*":
        field.label = _FIELD.LABEL_REPEATED
    if mark == "?":
        field.proto3_optional, field.oneof_index = True, len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    pool.Add(_file())
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))
        for name in _MESSAGES
    }


_CLASSES = _classes()
ForwardBackwardRequest: Any = _CLASSES["ForwardBackwardRequest"]
ForwardBackwardOutput: Any = _CLASSES["ForwardBackwardOutput"]
SampleResponse: Any = _CLASSES["SampleResponse"]
