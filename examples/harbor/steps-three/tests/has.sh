#!/bin/bash
# Whether a file has a line.
grep -qx "$2" "/app/$1"
