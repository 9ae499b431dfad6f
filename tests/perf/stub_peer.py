"""A peer for tests: the protocol of perf/kvpress_peer.py without kvpress or a model."""

from __future__ import annotations

import json
import os
import sys

for line in sys.stdin:
    request = json.loads(line)
    do = request.pop("do")
    if do == "die":
        sys.exit(3)
    if do == "fail":
        answer = {"error": "ValueError: no such press"}
    elif do == "threads":
        answer = {"threads": os.environ["OMP_NUM_THREADS"], "offline": os.environ["HF_HUB_OFFLINE"]}
    else:
        answer = {"did": do, **request}
    print(json.dumps(answer), flush=True)
