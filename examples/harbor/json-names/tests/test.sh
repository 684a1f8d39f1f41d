#!/bin/bash
reward=0
if [ "$(cat /app/names.txt)" = "$(printf 'Eva\nAbe\nMia')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
