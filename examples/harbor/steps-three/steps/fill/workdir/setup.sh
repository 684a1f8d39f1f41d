#!/bin/bash
mkdir -p drafts
echo one > drafts/1.txt
echo two > drafts/2.txt
