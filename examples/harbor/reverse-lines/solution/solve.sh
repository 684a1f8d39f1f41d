#!/bin/bash
tac steps.txt > reversed.txt
