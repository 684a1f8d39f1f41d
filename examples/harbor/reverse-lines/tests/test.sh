#!/bin/bash
reward=0
if [ "$(cat /app/reversed.txt)" = "$(printf 'four\nthree\ntwo\none')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
