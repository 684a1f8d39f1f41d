#!/bin/bash
python3 -c "import json; print(*[one['name'] for one in json.load(open('people.json'))], sep='\n')" > names.txt
