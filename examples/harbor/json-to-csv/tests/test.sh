#!/bin/bash
reward=0
if [ "$(cat /logs/artifacts/people.csv)" = "$(printf 'name,age\nEva,41\nAbe,29\nMia,35')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
