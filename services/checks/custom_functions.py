"""Checks the user's custom loss, advantage and backend, and makes them importable in every process.

`losses.custom` documents their arguments and how results are validated.
"""

from composer_mesh.configs.custom_function import CustomFunction
from composer_mesh.configs.losses import CustomLoss
from composer_mesh.configs.schema import Config
from composer_mesh.mesh.environment import add_import_paths


def check_custom_functions(config: Config) -> None:
    """Import the configured functions and check their signatures; raises CustomFunctionError.

    They are also searched in `run.import_paths`, here and in processes started later. Without a
    custom function nothing is imported.
    """
    sections = [
        section
        for section in (config.loss, config.advantage)
        if isinstance(section, CustomFunction)
    ]
    backend = config.trainer.backend
    if not sections and backend is None:
        return
    add_import_paths(config.run.import_paths)
    from composer_mesh.losses.custom import check_needs
    from composer_mesh.losses.custom_function import check_signature, load_function

    for section in sections:
        function = load_function(section.import_path)
        check_signature(function, section.import_path, section.kwargs)
        if isinstance(section, CustomLoss):
            check_needs(function, section.import_path, section.needs)
    if backend is not None:
        from composer_mesh.actors.models.users_backend import check_backend

        check_backend(backend)
