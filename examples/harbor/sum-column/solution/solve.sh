#!/bin/bash
awk -F, 'NR > 1 {sum += $3} END {print sum}' sales.csv > total.txt
