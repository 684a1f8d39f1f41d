#!/bin/bash
reward=0
if [ "$(cat /app/longest.txt)" = "over hills that nobody had named" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
