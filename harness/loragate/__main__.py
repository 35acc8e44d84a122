from __future__ import annotations

import sys

from loragate.cli import main

sys.exit(main())
