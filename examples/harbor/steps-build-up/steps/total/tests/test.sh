#!/bin/bash
reward=0
if [ "$(cat /app/sum.txt)" = 15 ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
