#!/bin/bash
python3 -c "import json; json.dump(sorted(json.load(open('people.json')), key=lambda one: one['age']), open('sorted.json', 'w'))"
