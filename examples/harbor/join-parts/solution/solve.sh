#!/bin/bash
ls parts | sort -n | while read -r name; do cat parts/$name; done > whole.txt
