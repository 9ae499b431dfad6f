"""python -m pipelines.score benchmark=<name> predictions=<folder>: official scores of anyone's prediction files."""

import sys

from pipelines.results.predictions import main

if __name__ == "__main__":
    sys.exit(main())
