"""A home with devices: what functions with typed arguments read and change."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from composer_mesh.rollouts.tool_calls import ToolCall
from composer_mesh.tasks.errors import ToolError

NAMES = [
    "lamp", "fan", "oven", "radio", "pump", "heater", "screen", "kettle", "alarm", "mixer",
]  # fmt: skip
Mode = Literal["eco", "auto", "max"]
MODES: tuple[Mode, ...] = ("eco", "auto", "max")
Level = Annotated[int, Field(ge=0, le=99)]
Minutes = Annotated[int, Field(ge=1, le=99)]
DONE = "ok"
HINTS = {
    "unknown_device": "There is no device {device}. The devices are: {devices}.",
    "device_off": "{device} is off. Switch it on before you set it.",
    "wrong_state": "Not all is as it was asked for. Do every step in order, with its own values.",
}
"""Templates of the hints for this home's errors."""


class Home:
    """Devices by name, each with `on`, `level`, `mode` and `timer` (minutes; 0 is none).

    Raises ToolError `unknown_device` for a name that it does not have, and `device_off` for a
    device whose level or mode is set while it is off.
    """

    def __init__(self, devices: Mapping[str, Mapping[str, Any]]) -> None:
        self.devices: dict[str, dict[str, Any]] = {
            name: dict(copy.deepcopy(state)) for name, state in devices.items()
        }

    def read_level(self, device: str) -> str:
        """Return a device's level."""
        return str(self._of(device)["level"])

    def set_level(self, device: str, level: int) -> str:
        """Set the level of a device that is on."""
        self._running(device)["level"] = level
        return DONE

    def set_mode(self, device: str, mode: Mode) -> str:
        """Set the mode of a device that is on."""
        self._running(device)["mode"] = mode
        return DONE

    def set_timer(self, device: str, minutes: int) -> str:
        """Let a device stop after some minutes."""
        self._of(device)["timer"] = minutes
        return DONE

    def switch(self, device: str, on: bool) -> str:
        """Switch a device on or off."""
        self._of(device)["on"] = on
        return DONE

    def call(self, call: ToolCall) -> str:
        """Do a call that is known to be right."""
        return str(getattr(self, call.name)(**call.arguments))

    def _of(self, device: str) -> dict[str, Any]:
        if device not in self.devices:
            facts = {"device": device[:40], "devices": ", ".join(sorted(self.devices))}
            raise ToolError("unknown_device", f"no device {device[:40]}", facts)
        return self.devices[device]

    def _running(self, device: str) -> dict[str, Any]:
        state = self._of(device)
        if not state["on"]:
            raise ToolError("device_off", f"{device} is off", {"device": device})
        return state
