#!/bin/bash
python3 -c "import json; print('name,age', *[f'{one[\"name\"]},{one[\"age\"]}' for one in json.load(open('people.json'))], sep='\n')" > people.csv
