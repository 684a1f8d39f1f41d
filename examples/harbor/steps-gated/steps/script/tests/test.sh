#!/bin/bash
reward=0
if [ "$(/app/double.sh 21)" = 42 ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
