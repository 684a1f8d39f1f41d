#!/bin/bash
reward=0
if [ -f /app/a.txt ] && [ "$(cat /app/b.txt)" = "the first file" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
