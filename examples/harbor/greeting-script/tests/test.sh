#!/bin/bash
reward=0
if [ "$(/app/greet.sh Ada)" = "Hello Ada" ] && [ "$(/app/greet.sh "Bo Li")" = "Hello Bo Li" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
