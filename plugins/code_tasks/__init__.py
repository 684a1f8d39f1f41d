"""Code tasks: agents edit and repair Python packages, and tests grade them."""
