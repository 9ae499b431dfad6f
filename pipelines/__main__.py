"""moend <verb> key=value ...: the programs of this package under one command; `python -m pipelines` is the same."""

import sys

from pipelines.cli.verbs import main

if __name__ == "__main__":
    sys.exit(main())
