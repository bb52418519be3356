"""`quire bench engine` under the name it had.

    python benchmarks/cpu_engine.py --model DIR [--peer-vllm PYTHON] [--peer-llama PYTHON]

Takes the options of `quire bench engine`.
"""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "engine", *sys.argv[1:]]))
