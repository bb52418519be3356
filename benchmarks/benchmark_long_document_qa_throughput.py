"""`quire bench long-document-qa` under the name it had as a script of vLLM.

    python benchmarks/benchmark_long_document_qa_throughput.py --model DIR ...

Takes the options of `quire bench long-document-qa`.
"""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "long-document-qa", *sys.argv[1:]]))
