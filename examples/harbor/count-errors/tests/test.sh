#!/bin/bash
reward=0
if [ "$(cat /app/errors.txt)" = 6 ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
