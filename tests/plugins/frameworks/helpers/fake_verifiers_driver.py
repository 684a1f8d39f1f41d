"""A driver that plays without verifiers: it asks the endpoint as its clients do. Run as a program.

What it plays is in `env` of its settings: for each trace its session, agent, requests and reward.
"""

import json
import os
import sys
import urllib.request
from typing import Any


def asked(order: dict[str, Any], session: str, ids: list[int]) -> list[int]:
    """The ids that the endpoint samples behind others."""
    url = order["base_url"].removesuffix("/v1") + "/inference/v1/generate"
    sampling = {"stop_token_ids": [1], "logprobs": 1, "skip_special_tokens": False}
    body = {"model": "policy", "token_ids": ids, "sampling_params": sampling}
    key = {"Authorization": f"Bearer {order['api_key']}", "X-Session-ID": session}
    request = urllib.request.Request(url, json.dumps(body).encode(), key)
    with urllib.request.urlopen(request) as answer:
        (choice,) = json.load(answer)["choices"]
    sampled: list[int] = choice["token_ids"]
    return [*ids, *sampled]


def trace(order: dict[str, Any], session: str, plan: dict[str, Any]) -> dict[str, Any]:
    """One agent's run: as many requests as it is told, each behind the answer before."""
    ids = [5]
    for _ in range(plan.get("turns", 1)):
        ids = [*asked(order, session, ids), 6]
    standard = {"agent": "agent", "trainable": True, "ok": True, "reward": 1.0, "stop": "done"}
    said = {**standard, "rewards": {}, "metrics": {}, **plan, "session": session}
    return {key: value for key, value in said.items() if key != "turns"}


def play(order: dict[str, Any], plan: dict[str, Any]) -> dict[str, Any]:
    """The answer to an order."""
    if plan.get("dies"):
        sys.stderr.write("no memory left\n")
        sys.stderr.flush()
        os._exit(9)
    if "error" in plan:
        return {"id": order["id"], "error": plan["error"]}
    traces = [
        trace(order, f"{order['id']}-{at}", one) for at, one in enumerate(plan.get("traces", [{}]))
    ]
    verdict = {"complete": plan.get("complete", True), "errors": plan.get("errors", [])}
    return {"id": order["id"], "episode": {**verdict, "traces": traces}}


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    plan = settings["env"]
    if "first_line" in plan:
        print(plan["first_line"], flush=True)
    else:
        print(json.dumps({"ready": "fake"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if plan.get("waits"):
            print(json.dumps({"heard": order}), file=sys.stderr, flush=True)
            continue
        print(json.dumps(play(order, plan)), flush=True)


if __name__ == "__main__":
    main()
