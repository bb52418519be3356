"""`quire bench structured-output` under the name it had as a script of vLLM.

    python benchmarks/benchmark_serving_structured_output.py --base-url URL ...

Takes the options of `quire bench structured-output`.
"""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "structured-output", *sys.argv[1:]]))
