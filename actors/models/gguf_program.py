"""The program that converts a GGUF file into a model folder in float32: FILE FOLDER.

It writes one line of JSON: {} or {"error"}. A process of its own, as it takes the memory of the
model and reads a stranger's file.
"""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

NOTE = "gguf.json"
"""The file of a converted folder that names the GGUF file and the types of its weights."""
FAILURES = (
    ArithmeticError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What gguf and transformers raise for files that they cannot read."""


def convert(file: Path, folder: Path) -> None:
    """Write the model of a file into a folder; raises `FAILURES`."""
    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from composer_mesh.actors.models.policy import save_policy

    weights: Counter[str] = Counter()
    for tensor in gguf.GGUFReader(file).tensors:
        weights[tensor.tensor_type.name] += int(tensor.n_elements)
    where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **where)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    config = model.config.to_dict()
    for key in ("quantization_config", "_model_name_or_path", "_name_or_path"):
        config.pop(key, None)
    with torch.device("meta"):  # one without a note of a quantization that is undone
        fresh = type(model)(type(model.config)(**config))
    fresh.load_state_dict(model.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = model.generation_config
    save_policy(fresh, tokenizer, folder)
    types = [name for name, _ in weights.most_common()]
    (folder / NOTE).write_text(json.dumps({"file": file.name, "types": types}))


def main(file: Path, folder: Path) -> None:
    """Convert, and write the answer."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    answer = {}
    try:
        convert(file, folder)
    except FAILURES as error:
        answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
    os.write(1, json.dumps(answer).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
