#!/bin/bash
reward=0
if [ "$(ls /app/docs)" = "$(printf 'a.md\nb.md\nkeep.csv')" ] && [ "$(cat /app/docs/a.md)" = first ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
