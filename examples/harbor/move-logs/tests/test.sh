#!/bin/bash
reward=0
if [ "$(ls /app/logs)" = "$(printf 'a.log\nb.log\nc.log')" ] && [ -z "$(find /app/work -name "*.log")" ] && [ -f /app/work/one/a.txt ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
