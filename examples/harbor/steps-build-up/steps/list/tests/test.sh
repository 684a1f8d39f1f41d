#!/bin/bash
reward=0
if [ "$(cat /app/numbers.txt)" = "$(seq 5)" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
