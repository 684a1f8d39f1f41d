#!/bin/bash
sed -i 's/colour/color/g' notes/*
