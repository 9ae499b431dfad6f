#!/usr/bin/env bash
# Stops the Slurm that start_local_slurm.sh brought up in DIR, and nothing else. Its jobs are cancelled. Files stay.
set -euo pipefail

name=${0##*/}
usage="usage: $name [DIR]"
die() {
  printf '%s: %s\n' "$name" "$1" >&2
  exit "${2:-1}"
}

case ${1:-} in
  -h | --help)
    printf '%s\n' "$usage"
    exit 0
    ;;
  -*) die "unknown option $1 ($usage)" 2 ;;
esac
[ $# -le 1 ] || die "one DIR only ($usage)" 2
dir=${1:-${TMPDIR:-/tmp}/local-slurm-$(id -u)}
[ -f "$dir/slurm.conf" ] || die "no slurm.conf in $dir: no Slurm was started there" 2
dir=$(cd "$dir" && pwd -P)
[ -O "$dir" ] || [ "$(id -u)" = 0 ] || die "$dir belongs to another user"

# shellcheck disable=SC2086  # names of variables, one word each
unset ${!SLURM@} ${!SQUEUE_@} ${!SCANCEL_@}
export SLURM_CONF=$dir/slurm.conf

if [ -z "${MOEND_SLURM_LOCKED:-}" ]; then # start_local_slurm.sh calls this while it holds the lock
  exec 9>"$dir/lock"
  flock -w 60 9 || die "another start or stop has held $dir/lock for a minute"
fi

# Does the process belong to this very folder? Numbers in pid files may be stale and belong to others by now.
ours() { # PID COMMAND
  [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ] &&
    tr '\0' '\n' 2>/dev/null <"/proc/$1/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF"
}

pids=()
for daemon in slurmd slurmctld; do
  pid=$(cat "$dir/$daemon.pid" 2>/dev/null || true)
  if [[ $pid =~ ^[0-9]+$ ]] && ours "$pid" "$daemon"; then pids+=("$pid"); fi
done
if [ ${#pids[@]} -eq 0 ]; then
  echo "not running"
  exit 0
fi

# First the jobs, or their processes would outlive the daemons.
queued() { timeout 5 squeue --noheader --format=%A 2>/dev/null | sort -u; }
mapfile -t left < <(queued)
if [ ${#left[@]} -gt 0 ]; then
  timeout 10 scancel --quiet "${left[@]}" 2>/dev/null || true
  for _ in {1..100}; do # longer than KillWait, after which Slurm kills what ignored SIGTERM
    [ -n "$(queued)" ] || break
    sleep 0.1
  done
fi

kill "${pids[@]}" 2>/dev/null || true
for _ in {1..200}; do
  left=()
  for pid in "${pids[@]}"; do
    if [ -e "/proc/$pid" ]; then left+=("$pid"); fi
  done
  if [ ${#left[@]} -eq 0 ]; then
    echo "stopped"
    exit 0
  fi
  sleep 0.1
done
die "still there 20 s after SIGTERM: process ${left[*]} (logs in $dir/log)"
