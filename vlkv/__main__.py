"""`python -m vlkv`: the same as `vlkv`."""

import sys

from vlkv.cli import main

sys.exit(main())
