"""`python -m quire` is the `quire` command."""

import sys

from quire.cli.main import main

sys.exit(main())
