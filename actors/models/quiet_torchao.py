"""Importing this silences torchao's warnings about kernels that nothing here uses.

transformers imports torchao wherever it is installed, and torchao then warns of each kernel that it
has for another device, and torch of how torchao registers its types.
"""

import logging

for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
