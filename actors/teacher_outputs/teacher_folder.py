"""Loads the model of the SDPO teacher: the policy's own folder, or that of another model.

Another model must have the policy's tokenizer, as the teacher reads the student's token ids.
"""

from pathlib import Path
from typing import Any

from composer_mesh.actors.models.language_model import LanguageModel
from composer_mesh.actors.models.policy import empty_model, load_model
from composer_mesh.actors.models.tokenizer import difference, load_tokenizer
from composer_mesh.configs.paths import TEACHER_KEY
from composer_mesh.configs.sdpo import SdpoConfig
from composer_mesh.planning.model_folder import OTHER_TOKENIZER, UnfitModelFolder


def check_teacher_tokenizer(config: SdpoConfig, policy: Path) -> None:
    """Raise `UnfitModelFolder` where the teacher's tokenizer is not that of the policy's folder."""
    if (other := config.teacher_model) is None:
        return
    if why := difference(load_tokenizer(policy), load_tokenizer(other.folder)):
        why = f"has another tokenizer, which {why}"
        raise UnfitModelFolder(str(other.folder), why, OTHER_TOKENIZER, TEACHER_KEY)


def load_teacher(config: SdpoConfig, policy: Path) -> Any:
    """Load the teacher's initial weights.

    Raises `UnfitModelFolder`, and `UnsupportedHead` for a head that the losses do not know.
    """
    if config.teacher_model is None:
        return load_model(policy)
    check_teacher_tokenizer(config, policy)
    try:
        model = load_model(config.teacher_model.folder)
    except UnfitModelFolder as error:
        raise error.at(TEACHER_KEY) from error
    LanguageModel(model).check_head()
    LanguageModel(model).check_rows()
    return model


def teacher_vocabulary(config: SdpoConfig, policy: Path) -> int | None:
    """Return the rows of the policy's head, to which another model's is fitted; else None."""
    if config.teacher_model is None:
        return None
    return len(empty_model(policy).get_output_embeddings().weight)
