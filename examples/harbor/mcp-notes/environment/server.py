"""A server of the Model Context Protocol: JSON lines over stdin and stdout."""

import json
import sys

NOTES = {"key": "lantern", "list": "key, list"}

TOOLS = [
    {
        "name": "read_note",
        "description": "Returns the text of a note.",
        "inputSchema": {
            "type": "object",
            "properties": {"note": {"type": "string"}},
            "required": ["note"],
        },
    }
]


def answer(method, params):
    if method == "initialize":
        version = params.get("protocolVersion", "2025-06-18")
        about = {"name": "notes", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if method == "tools/list":
        return {"tools": TOOLS}
    value = params["arguments"]["note"]
    text = NOTES.get(value)
    return {"content": [{"type": "text", "text": str(text)}], "isError": text is None}


for line in sys.stdin:
    request = json.loads(line)
    if "id" in request:
        result = answer(request["method"], request.get("params", {}))
        print(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}), flush=True)
