#!/bin/bash
ln -sfn v2 current
