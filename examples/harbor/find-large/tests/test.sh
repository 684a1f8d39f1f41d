#!/bin/bash
reward=0
if [ "$(cat /app/large.txt)" = "$(printf 'big.txt\nlong.txt')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
