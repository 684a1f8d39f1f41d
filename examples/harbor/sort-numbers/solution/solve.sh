#!/bin/bash
sort -n numbers.txt > sorted.txt
