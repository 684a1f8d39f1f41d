#!/bin/bash
reward=0
if [ "$(cat /app/whole.txt)" = "$(printf 'one\ntwo\nthree\nten\neleven')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
