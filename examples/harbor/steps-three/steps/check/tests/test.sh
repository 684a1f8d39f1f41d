#!/bin/bash
reward=0
if [ "$(cat /app/book/index.txt)" = "$(printf '1.txt\n2.txt\ntitle.txt')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
