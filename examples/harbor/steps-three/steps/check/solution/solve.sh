#!/bin/bash
ls book | grep -v index.txt > /tmp/index
mv /tmp/index book/index.txt
