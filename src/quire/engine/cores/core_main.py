"""The first module of an engine-core process; `core_process` says what its arguments are.

Imports make a million objects that all stay, and the garbage collector would go through them again
and again, which makes importing torch half as long again. So it is off before anything else is
imported. What the process does is in `core_process`.
"""

from __future__ import annotations

import gc
import os
import sys
import time


def main() -> None:
    """Entry point; does not return."""
    begun = time.monotonic()
    gc.disable()  # until the model is loaded
    from quire.engine.cores import core_process

    code = core_process.main(sys.argv, begun)
    sys.stderr.flush()
    # Threads may still be blocked in the socket; there is nothing left to clean up.
    os._exit(code)


if __name__ == "__main__":
    main()
