#!/bin/bash
mkdir -p logs
find work -name '*.log' -exec mv {} logs/ ';'
