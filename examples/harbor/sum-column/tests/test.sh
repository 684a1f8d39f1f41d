#!/bin/bash
reward=0
if [ "$(cat /app/total.txt)" = 61 ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
