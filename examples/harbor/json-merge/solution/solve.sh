#!/bin/bash
cat > merge.py <<'END'
import json


def merged(base, over):
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merged(base.get(key), one) for key, one in over.items()}}


base, over = (json.load(open(name)) for name in ("base.json", "override.json"))
json.dump(merged(base, over), open("merged.json", "w"))
END
python3 merge.py
