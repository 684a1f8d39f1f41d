"""The experts over real HTTP on loopback: who may ask, what comes back, how often it is wrong."""

import contextlib
import http.client
import json
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from raised_kinds import NAMES, raised
from surroundings import NEEDS_IPV6

from composer_mesh.actors.experts.http import LARGEST_REQUEST, Expert, ExpertPanel, ExpertServer
from composer_mesh.actors.provider.client import ProviderClient
from composer_mesh.actors.provider.endpoint import RetryDelays, TeacherEndpoint, Timeouts
from composer_mesh.actors.provider.errors import ProviderAuthError, ProviderRequestError
from composer_mesh.rollouts.tool_calls import call_text
from composer_mesh.rollouts.traces import Message

TOKEN = "the-token-of-these-tests"  # one for all workers: it is in the names of tests
EXPERTS = [Expert("never-wrong", 0.0), Expert("often-wrong", 0.3), Expert("also-wrong", 0.3)]


class EchoTask:
    """Knows one right action for each question, and wrong ones."""

    def expert(self, messages: list[Message]) -> str:
        if messages[0]["role"] != "user":
            raise ValueError("no question")
        question = messages[0]["content"]
        if question in NAMES:
            raise raised(question)
        return call_text("echo", {"q": question}) if len(messages) == 1 else f"Answer: {question}"

    def corrupted(self, messages: list[Message], rng: random.Random) -> str:
        return f"wrong {rng.randrange(1000)}"


def panel(seed: int = 3) -> ExpertPanel:
    return ExpertPanel(EchoTask(), seed, EXPERTS)


@pytest.fixture
def server() -> Iterator[ExpertServer]:
    with ExpertServer(panel(), TOKEN) as server:
        yield server


@pytest.fixture
def web(server: ExpertServer) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    with httpx.Client(
        base_url=server.base_url, headers=headers, trust_env=False, timeout=60
    ) as client:
        yield client


def question(number: int) -> list[Message]:
    return [{"role": "user", "content": str(number)}]


def request(number: int = 1, model: str = "never-wrong", **extra: object) -> dict:
    return {"model": model, "messages": question(number), **extra}


@pytest.mark.parametrize("address", ["127.0.0.4", pytest.param("::1", marks=NEEDS_IPV6)])
def test_it_listens_on_the_address_that_it_is_given_and_on_no_other(address: str) -> None:
    with ExpertServer(panel(), TOKEN, address=address) as server:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(
            base_url=server.base_url, headers=headers, trust_env=False, timeout=60
        ) as client:
            assert client.get("/models").status_code == 200
            assert client.get("/models", headers={"Authorization": "no"}).status_code == 401
        port = httpx.URL(server.base_url).port
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"StopIteration"}))
def test_whatever_the_tasks_expert_raises_is_answered_with_its_line(
    web: httpx.Client, name: str
) -> None:
    messages = [{"role": "user", "content": name}]
    answer = web.post("/chat/completions", json={"model": "never-wrong", "messages": messages})
    assert answer.status_code == 500
    said = answer.json()["error"]["message"]
    assert "the expert of the task failed at" in said
    assert name in said


def test_an_answer_is_a_chat_completion(web: httpx.Client) -> None:
    body = web.post("/chat/completions", json=request()).json()
    choice = body["choices"][0]
    function = choice["message"]["tool_calls"][0]["function"]
    assert (body["object"], body["model"]) == ("chat.completion", "never-wrong")
    assert body["id"].startswith("chatcmpl-")
    assert choice["finish_reason"] == "tool_calls"
    assert (function["name"], json.loads(function["arguments"])) == ("echo", {"q": "1"})
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0


def test_a_final_answer_is_content_and_stops(web: httpx.Client) -> None:
    messages = [*question(4), {"role": "assistant", "content": "hm"}]
    body = web.post("/chat/completions", json=request() | {"messages": messages}).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Answer: 4"}
    assert body["choices"][0]["finish_reason"] == "stop"


def test_models_are_the_experts(web: httpx.Client) -> None:
    body = web.get("/models").json()
    assert [model["id"] for model in body["data"]] == [expert.name for expert in EXPERTS]


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer x", f"Basic {TOKEN}", f"Bearer {TOKEN}x"])
@pytest.mark.parametrize(("method", "route"), [("GET", "/models"), ("POST", "/chat/completions")])
def test_nobody_is_answered_without_the_token(
    web: httpx.Client, method: str, route: str, token: str
) -> None:
    headers = {"Authorization": token}
    reply = web.request(method, route, json=request(), headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert TOKEN not in reply.text


def test_an_empty_token_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="the token is empty"):
        ExpertServer(panel(), "")


def test_an_unknown_model_is_a_404_with_an_error_body(web: httpx.Client) -> None:
    reply = web.post("/chat/completions", json=request(model="gpt"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found")
    assert "ask never-wrong, often-wrong, also-wrong" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", '"model"'),
        (b'{"model": 1}', '"model"'),
        (b'{"model": "m"}', '"messages"'),
        (b'{"model": "m", "messages": []}', '"messages"'),
        (b'{"model": "m", "messages": [{}]}', '"role"'),
        (json.dumps(request(stream=True)).encode(), "not streamed"),
        (json.dumps(request(n=2)).encode(), "not streamed"),
        (b'{"model": "never-wrong", "messages": [{"role": "x"}]}', "not an episode"),
        (b'{"model": "never-wrong", "messages": [{"role": "user"}]}', "not an episode"),
        (
            b'{"model": "never-wrong", "messages": [{"role": "a", "tool_calls": [1]}]}',
            "not an episode",
        ),
    ],
)
def test_a_bad_request_is_a_400_that_says_why(web: httpx.Client, content: bytes, says: str) -> None:
    reply = web.post("/chat/completions", content=content)
    assert reply.status_code == 400
    assert says in reply.json()["error"]["message"]
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("length", [str(LARGEST_REQUEST + 1), "9" * 5000])
def test_a_body_over_the_limit_is_refused_unread(server: ExpertServer, length: str) -> None:
    connection = http.client.HTTPConnection(httpx.URL(server.base_url).netloc.decode(), timeout=60)
    with contextlib.closing(connection):
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", length)
        connection.endheaders()
        reply = connection.getresponse()
        assert (reply.status, reply.headers["Connection"]) == (413, "close")
        assert "the limit is" in json.loads(reply.read())["error"]["message"]


def test_a_body_of_unknown_length_is_refused(web: httpx.Client) -> None:
    assert web.post("/chat/completions", content=iter([b"{}"])).status_code == 411


def test_other_routes_and_methods_get_error_bodies(web: httpx.Client) -> None:
    assert "no route" in web.get("/nothing").json()["error"]["message"]
    reply = web.put("/models", json={})
    assert (reply.status_code, reply.json()["error"]["type"]) == (501, "server_error")


def test_the_server_serves_again_after_each_refusal(web: httpx.Client) -> None:
    for bad in ({"content": b"{"}, {"content": iter([b"{}"])}, {"json": request(model="gpt")}):
        web.post("/chat/completions", **bad)
        assert web.post("/chat/completions", json=request()).status_code == 200


@pytest.mark.parametrize("expert", EXPERTS, ids=lambda expert: expert.name)
def test_the_stated_error_rate_is_the_real_one(expert: Expert) -> None:
    asked, of = 2000, panel()
    right = EchoTask().expert
    wrong = sum(of.action(expert.name, question(i)) != right(question(i)) for i in range(asked))
    deviation = math.sqrt(expert.error_rate * (1 - expert.error_rate) / asked)
    assert abs(wrong / asked - expert.error_rate) <= 4 * deviation


def test_experts_err_in_different_places() -> None:
    of, right = panel(), EchoTask().expert
    one, other = (
        {i for i in range(1000) if of.action(name, question(i)) != right(question(i))}
        for name in ("often-wrong", "also-wrong")
    )
    assert 50 < len(one & other) < 140  # 90 of 1,000 where they are independent


def test_answers_do_not_depend_on_order_or_connection(web: httpx.Client) -> None:
    def ask(number: int) -> tuple[int, dict]:
        reply = web.post("/chat/completions", json=request(number, "often-wrong"))
        return number, reply.json()["choices"]

    with ThreadPoolExecutor(8) as threads:
        backwards = dict(threads.map(ask, reversed(range(60))))
    with ExpertServer(panel(), TOKEN) as other:
        web.base_url = httpx.URL(other.base_url)
        assert dict(map(ask, range(60))) == backwards
        web.close()


def test_the_seed_moves_the_errors_and_call_ids_do_not() -> None:
    def actions(seed: int) -> list[str]:
        return [panel(seed).action("often-wrong", question(i)) for i in range(50)]

    def called(call_id: str) -> list[Message]:
        call = {"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        spoken = {"role": "assistant", "content": None, "tool_calls": [call]}
        return [*question(1), spoken, {"role": "tool", "tool_call_id": call_id, "content": "5"}]

    assert actions(1) == actions(1) != actions(2)
    answers = {panel(seed).action("often-wrong", called(f"id{seed}")) for seed in [1] * 3}
    assert answers == {panel(1).action("often-wrong", called("another"))}


@pytest.mark.parametrize("rate", [-0.1, 1.1, math.nan])
def test_an_error_rate_is_a_share(rate: float) -> None:
    with pytest.raises(ValueError, match=r"give a share in \[0, 1\]"):
        ExpertPanel(EchoTask(), 0, [Expert("e", rate)])


def test_experts_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="share names"):
        ExpertPanel(EchoTask(), 0, [Expert("e", 0.1), Expert("e", 0.2)])


def test_a_closed_server_answers_nobody_and_ends_kept_connections() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    server = ExpertServer(panel(), TOKEN).start()
    with httpx.Client(
        base_url=server.base_url, headers=headers, trust_env=False, timeout=60
    ) as client:
        assert client.get("/models").status_code == 200
        server.close()
        with pytest.raises(httpx.TransportError):
            client.get("/models")


async def test_the_provider_client_and_the_server_speak_the_same_protocol(
    server: ExpertServer,
) -> None:
    def teacher(model: str, env: str = "TOKEN") -> TeacherEndpoint:
        return TeacherEndpoint(f"{model} {env}", server.base_url, model, env)

    keys = {"TOKEN": TOKEN, "WRONG": "sk-wrong-wrong"}
    async with ProviderClient(Timeouts(20.0), RetryDelays(attempts=1), environ=keys) as client:
        answer = await client.complete(teacher("never-wrong"), question(8), [], seed=0)
        with pytest.raises(ProviderRequestError, match="'gpt' is not served"):
            await client.complete(teacher("gpt"), question(8), [], seed=0)
        with pytest.raises(ProviderAuthError, match="bearer token"):
            await client.complete(teacher("never-wrong", "WRONG"), question(8), [], seed=0)
    assert answer.action_text == call_text("echo", {"q": "8"})
    assert (answer.usd, answer.usd_known) == (0.0, True)
