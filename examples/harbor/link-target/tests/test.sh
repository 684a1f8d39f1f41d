#!/bin/bash
reward=0
if [ "$(readlink /app/current)" = v2 ] && [ "$(cat /app/current/name)" = two ] && [ -f /app/v1/name ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
