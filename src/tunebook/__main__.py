"""`python -m tunebook` is the command `tunebook`."""

from __future__ import annotations

import sys

from tunebook._cli import main

sys.exit(main())
