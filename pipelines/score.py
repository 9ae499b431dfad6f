"""python -m pipelines.score: see `pipelines.results.predictions`."""

import sys

from pipelines.results.predictions import main

if __name__ == "__main__":
    sys.exit(main())
