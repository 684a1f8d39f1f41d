#!/bin/bash
reward=0
if [ "$(ls /app/photos)" = "$(printf 'a.raw\nb.raw\nd.raw')" ]; then reward=1; fi
echo "$reward" > /logs/verifier/reward.txt
