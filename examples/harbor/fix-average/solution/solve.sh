#!/bin/bash
sed -i 's#len(numbers) - 1#len(numbers)#' average.py
