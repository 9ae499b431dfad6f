"""python -m pipelines.report: see `pipelines.reporting.report`."""

import sys

from pipelines.reporting.report import main

if __name__ == "__main__":
    sys.exit(main())
