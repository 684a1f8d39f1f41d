"""What the tasks of packages register: names and import paths, by kind (docs/plugins.md)."""

_FOLDER = "composer_mesh.plugins.task_packages"

TABLE = {
    "tasks": {
        "bfcl": f"{_FOLDER}.bfcl.task:BfclMultiTurn",
        "bfcl_single_call": f"{_FOLDER}.bfcl.single_call:BfclSingleCall",
        "reasoning_gym": f"{_FOLDER}.reasoning_gym:ReasoningGym",
        "tau2_telecom": f"{_FOLDER}.tau2_telecom:Tau2Telecom",
        "textarena": f"{_FOLDER}.textarena:TextArena",
    },
}
