#!/bin/bash
echo 12 > counter.txt
