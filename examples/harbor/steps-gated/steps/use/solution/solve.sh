#!/bin/bash
while read -r number; do ./double.sh $number; done < inputs.txt > doubled.txt
