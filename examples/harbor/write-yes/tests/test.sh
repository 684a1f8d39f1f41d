#!/bin/bash
reward=0
if [ "$(cat /app/answer.txt)" = yes ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
