#!/bin/bash
mkdir -p book
echo "$TOPIC" > book/title.txt
