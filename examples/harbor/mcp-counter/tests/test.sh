#!/bin/bash
reward=0
if [ "$(cat /app/counter.txt)" = 12 ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
