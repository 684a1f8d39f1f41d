#!/bin/bash
mkdir out
