"""The plan of the mesh follows the channels and the counts of the config."""

from pathlib import Path

from repository import ROOT

from composer_mesh.configs.load import load_config
from composer_mesh.planning.mesh_layout import MeshPlan, plan_mesh

QUICKSTART = ROOT / "configs" / "quickstart.toml"


def plan(*overrides: str) -> MeshPlan:
    return plan_mesh(load_config(QUICKSTART, overrides))


def kinds(*overrides: str) -> list[str]:
    return [row.kind for row in plan(*overrides).actors]


FREE = "prompt_usd_per_million = 0.0, completion_usd_per_million = 0.0"


def test_the_quickstart_has_every_kind_of_actor() -> None:
    assert kinds() == [
        "trainer",
        "generator",
        "environment",
        "rollouts",
        "sdpo_teacher",
        "teacher_replay",
        "reference",
        "expert_server",
    ]
    assert "reference" not in kinds("replay.loss=simpo")


def test_a_channel_of_weight_zero_has_no_actors() -> None:
    assert "sdpo_teacher" not in kinds("sdpo.alpha=0")
    assert kinds("replay.beta=0") == [
        *("trainer", "generator", "environment", "rollouts", "sdpo_teacher")
    ]


def test_a_channel_of_weight_zero_has_no_transport() -> None:
    off = plan("sdpo.alpha=0", "replay.beta=0")
    assert [row.what for row in off.transports] == ["weights", "requests and handles"]
    assert off.transports[0].targets == ("generator",)
    assert [channel.on for channel in off.channels] == [True, False, False]


def test_weights_travel_from_the_trainer_to_all_who_read_them() -> None:
    assert str(plan().transports[0]).startswith(
        "weights: trainer -> generator, sdpo_teacher: shared memory"
    )


def test_another_model_as_teacher_is_told_and_gets_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    shown = plan("sdpo.teacher=model", f"sdpo.teacher_model.path={tmp_path}")
    assert str(shown.transports[0]).startswith("weights: trainer -> generator: shared memory")
    (teacher,) = [row for row in shown.actors if row.kind == "sdpo_teacher"]
    assert teacher.role.endswith(f"as the model in {tmp_path}")


def test_a_backend_is_told() -> None:
    trainer = plan("trainer.backend.import_path=mine:Backend").actors[0]
    assert trainer.role.endswith("of the model of mine:Backend")


def test_the_expert_server_is_there_only_for_builtin_teachers() -> None:
    remote = f'kind = "openai", model = "m", base_url = "http://localhost:1/v1", {FREE}'
    teachers = ", ".join(f'{{name = "{name}", {remote}}}' for name in "abc")
    assert "expert_server" not in kinds(f"replay.teachers=[{teachers}]")


def test_the_states_go_to_each_address_once() -> None:
    remote = f'{{name = "c", kind = "openai", model = "m", base_url = "https://host/v1", {FREE}}}'
    local = ", ".join(f'{{name = "{name}", kind = "builtin"}}' for name in "ab")
    states = plan(f"replay.teachers=[{local}, {remote}]").transports[2]
    assert states.targets == ("expert_server", "https://host/v1")


def test_the_totals_count_every_process_and_thread() -> None:
    wide = plan("generator.replicas=3", "generator.threads=2", "replay.actors=4")
    assert wide.processes == plan().processes + 2 + 2
    assert wide.threads == plan().threads + (3 * 2 - 1) + 2
    (generator,) = [row for row in wide.actors if row.kind == "generator"]
    assert (generator.replicas, generator.processes, generator.threads) == (3, 3, 2)
