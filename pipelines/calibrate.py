"""python -m pipelines.calibrate: see `pipelines.execution.calibrate`."""

import sys

from pipelines.execution.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
