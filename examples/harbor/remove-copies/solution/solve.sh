#!/bin/bash
seen=""
for name in photos/*; do
  sum=$(cksum < $name)
  case "$seen" in *"<$sum>"*) rm $name ;; esac
  seen="$seen<$sum>"
done
