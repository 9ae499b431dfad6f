#!/usr/bin/env bash
# Brings up a throw-away Slurm of one node, on loopback only, for tests and for trying out (README.md beside this file).
set -euo pipefail

name=${0##*/}
usage="usage: $name [--cpus N] [--gpus N] [--ports SLURMCTLD,SLURMD] [--tasks N] [DIR]"
install="apt-get install -y --no-install-recommends"
# Processes refuse a socket whose path exceeds 107 bytes, and Slurm makes DIR/spool/localhost_<job>.<step>.
max_dir=70

die() {
  printf '%s: %s\n' "$name" "$1" >&2
  exit "${2:-1}"
}

# ---------------------------------------------------------------------------------------------------- the command line
cpus='' gpus='' ports='' tasks='' dir=''
while [ $# -gt 0 ]; do
  case $1 in
    --cpus | --gpus | --ports | --tasks)
      [ $# -ge 2 ] || die "$1 needs a value ($usage)" 2
      printf -v "${1#--}" %s "$2"
      shift 2
      ;;
    -h | --help)
      printf '%s\n' "$usage"
      exit 0
      ;;
    -*) die "unknown option $1 ($usage)" 2 ;;
    *)
      [ -z "$dir" ] || die "one DIR only, got $dir and $1 ($usage)" 2
      dir=$1
      shift
      ;;
  esac
done
[[ -z $cpus || $cpus =~ ^[1-9][0-9]{0,3}$ ]] || die "--cpus takes a whole number from 1 to 9999, got '$cpus'" 2
[[ -z $gpus || $gpus =~ ^[0-9]$ ]] || die "--gpus takes a whole number from 0 to 9, got '$gpus'" 2
[[ -z $tasks || $tasks =~ ^[1-9][0-9]{0,5}$ ]] ||
  die "--tasks takes a whole number from 1 to 999999, got '$tasks'" 2
[[ -z $ports || $ports =~ ^[1-9][0-9]{3,4},[1-9][0-9]{3,4}$ && ${ports%,*} -ne ${ports#*,} &&
  ${ports%,*} -le 65535 && ${ports#*,} -le 65535 ]] ||
  die "--ports takes two different numbers from 1000 to 65535 with a comma between, got '$ports'" 2

# ------------------------------------------------------------------------------------------------- what must be there
PATH=$PATH:/usr/sbin:/sbin # where Debian puts the daemons; not on the path of ordinary users
missing='' packages=''
for pair in slurmctld:slurmctld slurmd:slurmd {sbatch,squeue,sinfo,scancel,scontrol,srun}:slurm-client \
  flock:util-linux; do
  command -v "${pair%%:*}" >/dev/null && continue
  missing+=" ${pair%%:*}"
  [[ $packages == *" ${pair#*:}"* ]] || packages+=" ${pair#*:}"
done
[ -z "$missing" ] || die "not installed:$missing. On Debian and Ubuntu: $install$packages"

user=$(id -un 2>/dev/null) || die "user id $(id -u) has no name; Slurm needs one in the password file"

dir=${dir:-${TMPDIR:-/tmp}/local-slurm-$(id -u)}
mkdir -p "$dir" || die "cannot make the folder $dir"
[ -O "$dir" ] || die "$dir belongs to another user"
dir=$(cd "$dir" && pwd -P)
[[ $dir =~ ^[A-Za-z0-9_./+@~-]+$ ]] ||
  die "slurm.conf cannot hold the folder name '$dir': letters, digits and _./+@~- only" 2
[ ${#dir} -le $max_dir ] || die "the folder name $dir is longer than $max_dir characters; take a shorter one" 2
mkdir -p "$dir"/{state,spool,log}

# Settings of another cluster (or of the job that this may run in) must not leak into the daemons.
# shellcheck disable=SC2086  # names of variables, one word each
unset ${!SLURM@} ${!SBATCH_@} ${!SINFO_@} ${!SQUEUE_@} ${!SCANCEL_@}
export SLURM_CONF=$dir/slurm.conf

# One start or stop at a time in a folder. The descriptor is closed for the daemons, or they would keep the lock.
exec 9>"$dir/lock"
flock -w 60 9 || die "another start or stop has held $dir/lock for a minute"

# ---------------------------------------------------------------------------------------------------- configuration
# What is not asked for stays as it was, so that a plain second start changes nothing.
before() { [ -f "$SLURM_CONF" ] && grep -oP -m1 "(^|\s)$1=\K\S+" "$SLURM_CONF"; }

listens() { (exec 3<>"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

free_port() { # below the range from which kernels hand out ports to clients
  local port
  for _ in {1..100}; do
    port=$((20000 + (RANDOM * 32768 + RANDOM) % 12000))
    [ "$port" != "${1:-}" ] && ! listens "$port" && echo "$port" && return
  done
  return 1
}

# nproc follows OMP_NUM_THREADS, which says nothing about how many jobs fit.
cpus=${cpus:-$(before CPUs || env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)}
memory=$(before RealMemory || awk '/^MemTotal:/ {print int($2 / 1024 * 0.9)}' /proc/meminfo)
gpus=${gpus:-$(before '#gpus' || echo 2)}
# MaxArraySize is one more than the largest index, so it allows this many tasks with numbers from 1.
array=$([ -n "$tasks" ] && echo $((tasks + 1)) || before MaxArraySize || echo 1001)
if [ -n "$ports" ]; then
  ctld_port=${ports%,*} slurmd_port=${ports#*,}
else
  ctld_port=$(before SlurmctldPort || free_port) || die "found no free port"
  slurmd_port=$(before SlurmdPort || free_port "$ctld_port") || die "found no free port"
fi

# A fake GPU is a character device that exists and that nothing opens. Plain files would not do: jobs would be
# scheduled, but see no CUDA_VISIBLE_DEVICES.
devices=()
for device in /dev/{null,zero,full,random,urandom,tty,ptmx,console,kmsg}; do
  [ ${#devices[@]} -lt "$gpus" ] && [ -c "$device" ] && devices+=("$device")
done
[ ${#devices[@]} -eq "$gpus" ] || die "only ${#devices[@]} fake GPUs are possible here, $gpus were asked for" 2

write_gres() {
  local device
  for device in ${devices[@]+"${devices[@]}"}; do
    printf 'NodeName=localhost Name=gpu File=%s\n' "$device"
  done
}

write_conf() {
  cat <<CONF
# Written by $name.
#gpus=$gpus
ClusterName=local
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmUser=$user
SlurmdUser=$user
# No authentication: whoever reaches the ports is whoever they say they are.
AuthType=auth/none
CredType=cred/none
# A requeued job waits this many seconds (120 without this line).
AuthInfo=cred_expire=5
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/log/slurmctld.log
SlurmdLogFile=$dir/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$dir/log/jobs.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
ReturnToService=2
# A job that ignores SIGTERM gets SIGKILL after this many seconds (30 without this line).
KillWait=2
# Ended jobs stay visible to squeue --states=all for an hour: there is no accounting to ask.
MinJobAge=3600
MaxArraySize=$array
GresTypes=gpu
NodeName=localhost NodeAddr=127.0.0.1 CPUs=$cpus RealMemory=$memory Gres=gpu:$gpus State=UNKNOWN
PartitionName=debug Nodes=localhost Default=YES MaxTime=INFINITE State=UP
CONF
}

stop() { MOEND_SLURM_LOCKED=1 bash "$(dirname "$(readlink -f "$0")")/stop_local_slurm.sh" "$dir" >/dev/null; }

write_conf >"$dir/slurm.conf.new"
write_gres >"$dir/gres.conf.new"
if ! { cmp -s "$dir/slurm.conf.new" "$dir/slurm.conf" && cmp -s "$dir/gres.conf.new" "$dir/gres.conf"; }; then
  [ ! -e "$dir/slurm.conf" ] || stop # other settings were asked for
  mv "$dir/slurm.conf.new" "$dir/slurm.conf"
  mv "$dir/gres.conf.new" "$dir/gres.conf"
fi
rm -f "$dir"/{slurm,gres}.conf.new

# ----------------------------------------------------------------------------------------------------------- daemons
# Is the daemon of this very folder alive? A pid file alone may be stale and its number another process's by now.
alive() {
  local pid
  pid=$(cat "$dir/$1.pid" 2>/dev/null) && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = "$1" ] &&
    tr '\0' '\n' 2>/dev/null <"/proc/$pid/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF"
}

# The daemons, and srun in jobs, bind to whatever the host's name resolves to. Where that is not loopback they get a
# host name of their own.
host=$(uname -n)
# shellcheck disable=SC2016  # expanded by the inner shell
rename='hostname localhost && exec "$@"'
if [[ $(getent ahostsv4 "$host" || true) == 127.* ]]; then
  wrap=()
elif unshare --uts sh -c "$rename" sh true 2>/dev/null; then
  wrap=(unshare --uts sh -c "$rename" sh)
elif unshare --user --map-current-user --keep-caps --uts sh -c "$rename" sh true 2>/dev/null; then
  wrap=(unshare --user --map-current-user --keep-caps --uts sh -c "$rename" sh)
else
  die "the host name $host is not a loopback address: as root, add the line '127.0.0.1 $host' to /etc/hosts"
fi

give_up() {
  local log
  stop || true
  for log in slurmctld slurmd; do # .log is the daemon's own, .out is what it printed before it had one
    cat "$dir/log/$log.out" "$dir/log/$log.log" 2>/dev/null |
      grep -E 'fatal|error|denied|not found' | tail -n 3 >&2 || true
  done
  die "Slurm did not come up: $1 (logs in $dir/log)"
}

begin() {
  local port=$2
  alive "$1" && return
  rm -f "$dir/$1.pid"
  ! listens "$port" || die "port $port is taken by another program: choose others with --ports"
  ${wrap[@]+"${wrap[@]}"} "$1" "${@:3}" </dev/null >>"$dir/log/$1.out" 2>&1 9>&- || give_up "$1 ended at once"
}
begin slurmctld "$ctld_port"
begin slurmd "$slurmd_port" -N localhost

for _ in {1..100}; do
  state=$(timeout 5 sinfo --noheader --format=%T 2>/dev/null || true)
  case $state in
    idle | mixed | allocated | completing)
      printf 'export SLURM_CONF=%q\n' "$SLURM_CONF"
      exit 0
      ;;
    drain* | down*) scontrol update nodename=localhost state=resume >/dev/null 2>&1 || true ;;
  esac
  sleep 0.1
done
give_up "the node's state is '${state:-unknown}' after 10 s"
