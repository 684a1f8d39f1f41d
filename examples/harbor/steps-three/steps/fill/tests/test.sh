#!/bin/bash
reward=0
if /tests/has.sh book/1.txt one && /tests/has.sh book/2.txt two; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
