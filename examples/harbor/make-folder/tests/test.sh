#!/bin/bash
reward=0
if [ -d /app/out ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
