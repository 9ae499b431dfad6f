"""python -m pipelines.sync: see `pipelines.tracking.upload`."""

import sys

from pipelines.tracking.upload import main

if __name__ == "__main__":
    sys.exit(main())
