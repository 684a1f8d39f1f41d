#!/bin/bash
awk 'length > length(best) {best = $0} END {print best}' poem.txt > longest.txt
