"""What islands by torchft need is told before anything starts."""

from __future__ import annotations

import pickle
import sys

import pytest
from lighthouses import lighthouse_server
from pytest_httpserver import HTTPServer

from composer_mesh.configs.islands import IslandsConfig
from composer_mesh.plugins.islands.rounds.torchft_rules import (
    LighthouseUnfit,
    OtherLayout,
    TorchftMissing,
    check_lighthouse,
    check_torchft,
)


def test_a_lighthouse_that_answers_is_accepted() -> None:
    with lighthouse_server() as address:
        check_lighthouse(address)


def test_an_address_without_one_is_refused() -> None:
    with pytest.raises(LighthouseUnfit, match=r"does not answer .* start torchft_lighthouse"):
        check_lighthouse("http://127.0.0.1:9")


def test_another_server_is_refused(httpserver: HTTPServer) -> None:
    httpserver.expect_request("/").respond_with_data("hello")
    with pytest.raises(LighthouseUnfit, match="is not a lighthouse"):
        check_lighthouse(httpserver.url_for("/"))


def test_a_missing_package_is_told_only_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    by_lighthouse = IslandsConfig.model_validate({"lighthouse": "http://127.0.0.1:1"})
    check_torchft(by_lighthouse)
    monkeypatch.setitem(sys.modules, "torchft", None)
    with pytest.raises(TorchftMissing, match=r"pip install 'composer-mesh\[torchft\]'"):
        check_torchft(by_lighthouse)
    check_torchft(IslandsConfig())


@pytest.mark.parametrize(
    "error", [LighthouseUnfit("http://h:1", "is away"), TorchftMissing(), OtherLayout()]
)
def test_refusals_cross_processes_with_their_text(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))
