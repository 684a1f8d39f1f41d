"""Prints the mean of the numbers that it is given."""

import sys

numbers = [float(one) for one in sys.argv[1:]]
print(sum(numbers) / (len(numbers) - 1) if numbers else 0)
