#!/bin/bash
echo 15 > sum.txt
