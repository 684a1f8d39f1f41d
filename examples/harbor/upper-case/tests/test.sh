#!/bin/bash
reward=0
if [ "$(cat /app/upper.txt)" = "$(printf 'CARLA\nBO\nANNA\nDENIZ')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
