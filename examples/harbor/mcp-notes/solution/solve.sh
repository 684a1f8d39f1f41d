#!/bin/bash
echo lantern > key.txt
