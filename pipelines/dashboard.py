"""python -m pipelines.dashboard [paper=all] [push=true]: W&B dashboards and reports, one of each per paper."""

import sys

from pipelines.tracking.dashboards import main

if __name__ == "__main__":
    sys.exit(main())
