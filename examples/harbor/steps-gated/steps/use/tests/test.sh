#!/bin/bash
reward=0
if [ "$(cat /app/doubled.txt)" = "$(printf '6\n16\n100')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
