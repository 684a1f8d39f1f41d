#!/bin/bash
reward=0
if [ "$(cat /app/word.txt)" = hello ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
