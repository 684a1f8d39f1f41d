"""What a fake SDPO teacher promises of its moving average, the real actor does.

Their outputs are read by RDMA and need processes: tests/procs/test_sdpo_mesh.py has them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_teachers import FakeTeacher
from in_process_host import InProcessHost

from composer_mesh.actors.checkpoints.teacher_average import AVERAGE_FILE
from composer_mesh.actors.sdpo_teacher import SDPOTeacherActor

DEADLINE_S = 60.0


@pytest.fixture(params=["fake", "SDPOTeacherActor"])
async def teacher(
    request: Any, build_config: Any, build_model: Any, tokenizer: Any, tmp_path: Path
) -> Any:
    if request.param == "fake":
        return FakeTeacher("sdpo_teacher", [])
    folder = tmp_path / "policy"
    build_model(1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    teacher = await InProcessHost().spawn("sdpo_teacher", SDPOTeacherActor)
    config = build_config(sdpo={"alpha": 0.5, "teacher": "ema", "placement": "mesh"})
    await teacher.call("load", config, folder)
    return teacher


async def test_an_average_that_was_kept_is_written_and_can_be_restored(
    teacher: Any, tmp_path: Path
) -> None:
    async def call(endpoint: str, *args: Any) -> Any:
        return await teacher.call(endpoint, *args, deadline_s=DEADLINE_S)

    assert await call("restore", 0, None) == 0
    assert await call("keep") == 0
    (file,) = await call("write", tmp_path)
    assert file.path == AVERAGE_FILE
    await call("forget")
    assert await call("restore", 3, tmp_path / AVERAGE_FILE) == 3
    assert await call("keep") == 3
