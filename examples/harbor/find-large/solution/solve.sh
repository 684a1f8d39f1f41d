#!/bin/bash
find data -type f -size +100c | sed 's#.*/##' | sort > large.txt
