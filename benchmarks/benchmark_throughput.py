"""`quire bench throughput` under the name it had as a script of vLLM.

    python benchmarks/benchmark_throughput.py --model DIR ...

Takes the options of `quire bench throughput`.
"""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "throughput", *sys.argv[1:]]))
