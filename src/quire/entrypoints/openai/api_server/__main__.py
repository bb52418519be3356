"""`python -m quire.entrypoints.openai.api_server`: `quire serve` by another name."""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
