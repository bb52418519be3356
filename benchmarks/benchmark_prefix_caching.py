"""`quire bench prefix-caching` under the name it had as a script of vLLM.

    python benchmarks/benchmark_prefix_caching.py --model DIR ...

Takes the options of `quire bench prefix-caching`.
"""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "prefix-caching", *sys.argv[1:]]))
