"""Sessions of Harbor: programs of others that play in its containers."""

from __future__ import annotations

import nox
from nox_helpers import NO_COMPILE, environment, npm, over, pytest, python_of

HARNESSES = ("@anthropic-ai/claude-code@latest", "@openai/codex@latest")
ENDPOINT = "tests/unit/actors/rollout_workers"


@nox.session
def harnesses(session: nox.Session) -> None:
    """Claude Code, Codex and mini-swe-agent in boxes and meshes, and the newest SDKs."""
    folder = environment(session)
    over(folder)
    session.install(NO_COMPILE, "--upgrade", "anthropic", "openai")
    session.install(NO_COMPILE, "--upgrade", "--target", str(folder / "mini"), "mini-swe-agent")
    npm(session, *HARNESSES)
    files = (f"{ENDPOINT}/test_agent_endpoint.py", f"{ENDPOINT}/test_anthropic_messages.py")
    pytest(session, *files, "-rs", "-p", "no:cacheprovider", python=python_of(folder))
    procs = "tests/plugins/harbor/procs"
    names = ("programs", "mesh", "resumed")
    tests = [f"{procs}/test_harness_{name}.py" for name in names]
    pytest(session, *tests, "-rs", COMPOSER_MESH_TEST_HARNESSES=folder)
