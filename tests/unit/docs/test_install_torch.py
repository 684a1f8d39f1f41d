"""The build of torch that an installation chooses, with folders of wheels as package indexes."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from repository import ROOT

SCRIPT = ROOT / "requirements" / "install_torch.py"
MAIN = "import sys, install_torch as it; sys.exit(it.main(sys.argv[2:], devices=sys.argv[1]))"


def wheel(folder: Path, version: str) -> None:
    """Write an empty torch of a version."""
    info = f"torch-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    hashes = {
        name: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        for name, text in files.items()
    }
    record = "".join(f"{name},sha256={hashes[name]},{len(files[name])}\n" for name in files)
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as archive:
        for name, text in (*files.items(), (f"{info}/RECORD", f"{record}{info}/RECORD,,\n")):
            archive.writestr(name, text)


@pytest.fixture
def install_torch() -> Any:
    spec = spec_from_file_location("install_torch", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("PIP_CONSTRAINT", "PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("there", "found"), [(("2.13.0", "2.13.0+cpu"), ()), (("2.13.0",), None)])
def test_a_cpu_build_is_chosen_where_the_configured_index_offers_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    install_torch: ModuleType,
    there: tuple[str, ...],
    found: tuple[str, ...] | None,
) -> None:
    for version in (*there, "2.12.0+cpu"):
        wheel(tmp_path, version)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert install_torch.cpu_index("2.13.0") == found


def test_without_an_answer_there_is_no_cpu_build(install_torch: ModuleType) -> None:
    assert install_torch.cpu_index("2.13.0") is None


@pytest.mark.parametrize(
    ("device", "found"),
    [("nvidia0", True), ("nvidiactl", True), ("kfd", True), ("dxg", True), ("nvram", False)],
)
def test_a_gpu_is_recognized_by_the_files_of_its_driver(
    tmp_path: Path, install_torch: ModuleType, device: str, found: bool
) -> None:
    (tmp_path / device).touch()
    assert install_torch.gpus(str(tmp_path)) is found


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one build")
def test_without_a_gpu_the_cpu_build_is_installed_and_kept_when_one_appears(tmp_path: Path) -> None:
    """And arguments for pip decide alone."""
    for version in ("2.13.0", "2.13.0+cpu"):
        wheel(tmp_path / "wheels", version)
    wheel(tmp_path / "own", "2.13.0+own")
    environment, devices = tmp_path / "environment", tmp_path / "devices"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    devices.mkdir()
    python = environment / "bin" / "python"

    def install(*arguments: str) -> tuple[str, str]:
        command = [python, "-c", MAIN, str(devices), *arguments]
        env = {
            "PYTHONPATH": str(SCRIPT.parent),
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        }
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        code = "from importlib.metadata import version; print(version('torch'))"
        # Isolated: PYTHONPATH may name where the torch of these tests is.
        listed = subprocess.run([python, "-Ic", code], capture_output=True, text=True, check=True)
        return listed.stdout.strip(), done.stdout

    version, printed = install()
    assert version == "2.13.0+cpu"
    assert "No GPU is found: installing torch 2.13.0+cpu" in printed
    (devices / "nvidia0").touch()
    version, printed = install()
    assert version == "2.13.0+cpu"
    assert "No GPU" not in printed
    own = ("--force-reinstall", "--find-links", str(tmp_path / "own"))
    assert install(*own)[0] == "2.13.0+own"
