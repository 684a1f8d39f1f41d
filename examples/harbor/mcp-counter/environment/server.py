"""A server of the Model Context Protocol: JSON lines over stdin and stdout."""

import json
import sys

COUNTER = [0]

TOOLS = [
    {
        "name": "add",
        "description": "Adds a number below 10 to the counter; returns the counter.",
        "inputSchema": {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        },
    }
]


def answer(method, params):
    if method == "initialize":
        version = params.get("protocolVersion", "2025-06-18")
        about = {"name": "counter", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": TOOLS}
    value = params["arguments"]["number"]
    COUNTER[0] += value if value < 10 else 0
    text = COUNTER[0]
    return {"content": [{"type": "text", "text": str(text)}], "isError": text is None}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
