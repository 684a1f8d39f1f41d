#!/bin/bash
for name in docs/*.txt; do mv $name ${name%.txt}.md; done
