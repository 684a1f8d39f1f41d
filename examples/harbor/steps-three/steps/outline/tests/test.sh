#!/bin/bash
reward=0
if /tests/has.sh book/title.txt tides; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
