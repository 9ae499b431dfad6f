"""python -m pipelines.cluster.local SUBMISSION: runs a submission on this machine, its stages one after the other.

Started by pipelines.cluster.submit in a session of its own. Workers are submitit's local jobs; they share all groups by
the leases of the store, so that the others finish what one that dies leaves behind.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipelines.cluster import worker
from pipelines.cluster.jobs import End, Started, Submitted, last_line, now
from pipelines.store.files import read_json
from pipelines.store.lease import Process

POLL_S = 0.2
A_MONTH = 30 * 24 * 60  # submitit's local jobs have a time limit of two minutes unless told


def main(argv: Sequence[str] | None = None) -> int:
    """Calibrations (each after what it needs), the workers, the report. 0 also where cells failed: files tell."""
    (path,) = sys.argv[1:] if argv is None else argv
    frozen = read_json(Path(path))
    os.environ["MOEND_LOCAL_JOB"] = f"local-{os.getpid()}"
    pool = _Pool(Submitted(Path(path).parents[1]), int(frozen["workers"]), list(frozen["gpus"]))
    waiting: dict[str, Any] = dict(frozen["calibrations"])
    while waiting:
        ready = [k for k, entry in waiting.items() if not set(entry["after"]) & set(waiting)]
        pool.run([worker.Calibrate(path, k) for k in ready])
        for key in ready:
            del waiting[key]
    keys = tuple(c["key"] for c in frozen["cells"])
    pool.run([worker.Run(path, keys, turn=i / pool.size) for i in range(pool.size)])
    pool.run([worker.Report(path)])
    print(f"{now()} finished", flush=True)
    return 0


class _Pool:
    """At most `size` jobs at the same time."""

    def __init__(self, sweep: Submitted, size: int, gpus: Sequence[str]):
        self.sweep, self.size, self.gpus = sweep, size, gpus
        threads = max(1, (os.cpu_count() or 1) // size)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # workers that share cores slow each other down

    def run(self, work: Sequence[worker.Work]) -> None:
        """Run all, and return when the last has ended."""
        import submitit

        executor = submitit.LocalExecutor(self.sweep.log, python=f"{shlex.quote(sys.executable)} -P")
        executor.update_parameters(timeout_min=A_MONTH, stderr_to_stdout=True)
        queue, running = list(work), dict[int, tuple[Any, worker.Work]]()
        while queue or running:
            for slot in range(self.size):
                if queue and slot not in running:
                    gpu = self.gpus[slot % len(self.gpus)] if self.gpus else None
                    todo = dataclasses.replace(queue.pop(0), gpu=gpu)
                    job = executor.submit(todo)
                    running[slot] = job, todo
                    print(f"{now()} started {job.job_id}: {type(todo).__name__}", flush=True)
            time.sleep(POLL_S)
            for slot in [slot for slot, (job, _) in running.items() if job.done()]:
                self._ended(*running.pop(slot))

    def _ended(self, job: Any, done: worker.Work) -> None:
        """A worker that ended before it could say a word has left one in its own log: that is told as its own."""
        id, log = f"{os.environ['MOEND_LOCAL_JOB']}-{job.job_id}", str(job.paths.stdout)
        if self.sweep.started_of(id) is None:
            word = last_line(log) or "it ended without a word"
            self.sweep.write_started(Started(id, done.kind, Process.of(os.getpid()), time.time(), {}, log, ended=word))
            if isinstance(done, worker.Calibrate):
                self.sweep.write_end(f"calibration-{done.key}", End("failed", word, id, log))


if __name__ == "__main__":
    sys.exit(main())
