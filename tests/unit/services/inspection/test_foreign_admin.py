"""An admin server that is none: a status may name the port of any program of this machine."""

from __future__ import annotations

import pytest
from pytest_httpserver import HTTPServer

from composer_mesh.mesh.admin import AdminUnreachable, read_mesh


@pytest.mark.parametrize(
    "answer", [{}, [], 5, {"children": 5}, {"children": [5]}, {"children": [{}]}], ids=str
)
def test_another_program_behind_the_port_is_no_mesh(httpserver: HTTPServer, answer: object) -> None:
    httpserver.expect_request("/v1/root").respond_with_json(answer)
    httpserver.expect_request("/v1/x").respond_with_json({"children": []})
    with pytest.raises(AdminUnreachable, match="has the run ended"):
        read_mesh(httpserver.url_for("").rstrip("/"))
