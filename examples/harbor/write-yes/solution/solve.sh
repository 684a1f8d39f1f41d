#!/bin/bash
echo yes > answer.txt
