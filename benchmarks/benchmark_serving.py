"""`quire bench serve` under the name it had as a script of vLLM.

    python benchmarks/benchmark_serving.py --backend vllm --dataset-name random ...

Takes the options of `quire bench serve`.
"""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
