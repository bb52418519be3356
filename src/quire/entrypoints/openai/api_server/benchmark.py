"""`python -m quire.entrypoints.openai.api_server.benchmark` is `quire bench serve`."""

import sys

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serve", *sys.argv[1:]]))
