"""`quire bench prioritization` under the name it had as a script of vLLM.

    python benchmarks/benchmark_prioritization.py --model DIR ...

Takes the options of `quire bench prioritization`.
"""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "prioritization", *sys.argv[1:]]))
