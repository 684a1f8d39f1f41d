#!/bin/bash
printf '#!/bin/bash\necho $((2 * $''1))\n' > double.sh
chmod +x double.sh
