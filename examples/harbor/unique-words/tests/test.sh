#!/bin/bash
reward=0
if [ "$(tr -d " " < /app/count.txt)" = 7 ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
