"""python -m pipelines.list methods|models|benchmarks|sweeps|figures: what there is to choose from."""

import sys

from pipelines.cli.catalog import main

if __name__ == "__main__":
    sys.exit(main())
