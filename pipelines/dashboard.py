"""python -m pipelines.dashboard: see `pipelines.tracking.dashboards`."""

import sys

from pipelines.tracking.dashboards import main

if __name__ == "__main__":
    sys.exit(main())
