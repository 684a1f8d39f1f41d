#!/bin/bash
seq 5 > numbers.txt
