#!/bin/bash
cp drafts/* book/
