"""Checks the user's custom loss and advantage, and makes them importable in every process.

`losses.custom` documents their arguments and how results are validated.
"""

import os
import sys
from pathlib import Path

from composer_mesh.configs.advantages import CustomAdvantage
from composer_mesh.configs.losses import CustomLoss
from composer_mesh.configs.schema import Config


def check_custom_functions(config: Config) -> None:
    """Import the configured functions and check their signatures; raises CustomFunctionError.

    The working directory is put first on the import path, here and in processes started later, as
    `python -m` does. Without a custom function nothing is imported or changed.
    """
    sections = [
        section
        for section in (config.loss, config.advantage)
        if isinstance(section, CustomLoss | CustomAdvantage)
    ]
    if not sections:
        return
    _find_modules_in(Path.cwd())
    from composer_mesh.losses.custom_function import check_signature, load_function

    for section in sections:
        function = load_function(section.import_path)
        check_signature(function, section.import_path, section.kwargs)


def _find_modules_in(folder: Path) -> None:
    for_children = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if str(folder) not in for_children:
        places = [place for place in (str(folder), *for_children) if place]
        os.environ["PYTHONPATH"] = os.pathsep.join(places)
