#!/bin/bash
reward=0
if [ -f /app/done ] && [ ! -s /app/done ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
