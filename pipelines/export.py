"""python -m pipelines.export plan FILE to=kvpress|trtllm|sglang|vllm: plans and statistics for other people's tools."""

import sys

from pipelines.results.export import main

if __name__ == "__main__":
    sys.exit(main())
