#!/bin/bash
reward=0
if [ "$(cat /app/sorted.txt)" = "$(printf -- '-3\n2\n9\n10\n100')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
