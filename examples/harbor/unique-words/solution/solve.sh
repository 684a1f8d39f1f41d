#!/bin/bash
tr A-Z a-z < text.txt | tr -s ' ' '\n' | sort -u | wc -l > count.txt
