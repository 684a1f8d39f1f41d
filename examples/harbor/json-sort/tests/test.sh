#!/bin/bash
python3 -I /tests/check.py
