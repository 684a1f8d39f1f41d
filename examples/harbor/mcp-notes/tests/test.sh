#!/bin/bash
reward=0
if [ "$(cat /app/key.txt)" = lantern ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
