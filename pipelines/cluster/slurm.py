"""What is asked of Slurm besides submitting: its limits, the states of jobs (without accounting), cancelling."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from moend.errors import UserError, unknown
from pipelines.planning.schema import minutes

GONE = "GONE"  # ended so long ago that Slurm forgot it (MinJobAge): only files tell how
LIVE = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
        *("RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "RESV_DEL_HOLD"),
    }
)
A_YEAR = 365 * 24 * 60


class Unreachable(Exception):
    """Slurm does not answer: not the user's mistake."""


@contextlib.contextmanager
def outside_a_job() -> Iterator[None]:
    """The environment of a login node. A job submitted from within another one would inherit that one's numbers."""
    from submitit.helpers import clean_env

    keep = {k: v for k, v in os.environ.items() if k in ("SLURM_CONF", "SLURM_CLUSTERS") or k.startswith("SBATCH_")}
    with clean_env():
        os.environ.update(keep)
        yield


def ask(*command: str) -> str:
    """The output of one of Slurm's commands. UserError where there is no Slurm here, Unreachable where it is silent."""
    if shutil.which(command[0]) is None:
        raise UserError(f"cluster=slurm needs Slurm, but there is no {command[0]} on PATH; cluster=local runs here")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} did not answer within 60 s") from None
    if done.returncode == 0:
        return done.stdout
    raise failure(done.stderr, command[0])


_CONFIGURATION = ("configuration source", "slurm.conf", "SLURM_CONF", "DNS SRV lookup", "fetch_config")
_MISTAKES = re.compile(
    r"invalid (?!job id)|not available|not permitted|violates|exceeds|cannot be satisfied|more processors|"
    r"memory specification|unrecognized|time limit|limit.* specification|no partition|unable to parse|"
    r"access/permission",
    re.IGNORECASE,
)


def failure(text: str, program: str) -> Exception:
    """The error that a program of Slurm printed: the user's (UserError) or the cluster's (Unreachable), in one line."""
    if any(word in text for word in _CONFIGURATION):
        given = os.environ.get("SLURM_CONF")
        where = f"SLURM_CONF={given} is not one" if given else "SLURM_CONF is not set and there is none in /etc/slurm"
        return UserError(f"cluster=slurm: Slurm finds no configuration ({where}); slurm/README.md starts a small one")
    lines = [re.sub(r"^\w+: (error|fatal): ", "", x.strip()) for x in text.splitlines() if x.strip()]
    told = [x for x, raw in zip(lines, text.split("\n"), strict=False) if raw.startswith(program)] or lines
    line = next((x for x in told if _MISTAKES.search(x)), told[-1] if told else "it ended without a word")
    return UserError(f"{program}: {line}") if _MISTAKES.search(line) else Unreachable(f"{program}: {line}")


def array_limit() -> int:
    """How many tasks an array may have here (MaxArraySize is one more than the largest index)."""
    match = re.search(r"^MaxArraySize\s*=\s*(\d+)", ask("scontrol", "show", "config"), re.MULTILINE)
    return max(1, int(match[1]) - 1) if match else 1


def time_limit(partition: str | None) -> int:
    """The minutes that a partition gives where nothing is asked for; UserError for a partition that is not there."""
    lines = ask("scontrol", "--all", "--oneliner", "show", "partition").splitlines()
    found = {p["PartitionName"]: p for p in (dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines)}
    default = [name for name, fields in found.items() if fields.get("Default") == "YES"]
    names = partition.split(",") if partition else default or list(found)
    for name in names:
        if name not in found:
            raise unknown("cluster.partition", name, found)
    if not names:
        raise UserError("this cluster has no default partition: set cluster.partition")
    limits = []
    for fields in (found[name] for name in names):
        given = [fields.get(k, "NONE") for k in ("DefaultTime", "MaxTime")]
        limits.append(next((minutes(x) or A_YEAR for x in given if x not in ("NONE", "UNLIMITED")), A_YEAR))
    return min(limits)


def states(ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Job -> (state, reason), from squeue, which needs no accounting and knows ended jobs for a while; else GONE."""
    wanted = list(ids)
    heads = ",".join(dict.fromkeys(i.partition("_")[0] for i in wanted))
    if not heads:
        return {}
    try:
        out = ask("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%r", f"--jobs={heads}")
    except Unreachable as e:
        if "invalid job id" not in str(e).lower():
            raise
        out = ""  # all of them are forgotten
    known = {}
    for line in out.splitlines():
        id, state, reason = (*line.strip().split("|", 2), "", "")[:3]
        known[id] = (state, "" if reason == "None" else reason)
    return {i: known.get(i, (GONE, "")) for i in wanted}


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs and tasks of arrays; those that have ended are no error."""
    for start in range(0, len(ids), 100):
        ask("scancel", "--quiet", *ids[start : start + 100])
