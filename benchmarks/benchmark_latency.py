"""`quire bench latency` under the name it had as a script of vLLM.

    python benchmarks/benchmark_latency.py --model DIR ...

Takes the options of `quire bench latency`.
"""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "latency", *sys.argv[1:]]))
