#!/usr/bin/env bash
# Start Slurm on this machine, one node, for the tests: as root on Debian (or where slurm-wlm and munge are).
#     bash research/tests/slurm.sh FOLDER        settings, logs and state of the cluster go there
#     bash research/tests/slurm.sh FOLDER stop
set -euo pipefail
FOLDER=$(mkdir -p "$1" && cd "$1" && pwd)
HOST=$(hostname -s)
export SLURM_CONF=$FOLDER/slurm.conf
# Inside of jobs Snakemake keeps no variable that says where the settings are.
DEFAULT=/etc/slurm/slurm.conf

stop() {
    for name in slurmd slurmctld munged; do
        [ ! -f "$FOLDER/$name.pid" ] || kill "$(cat "$FOLDER/$name.pid")" 2>/dev/null || true
    done
    [ ! -L "$DEFAULT" ] || rm "$DEFAULT"
}
if [ "${2:-}" = stop ]; then
    stop
    exit
fi

if ! command -v slurmctld munged >/dev/null; then
    apt-get install --yes --no-install-recommends slurm-wlm munge >"$FOLDER/apt.log" 2>&1
fi
if [ -e "$DEFAULT" ] && [ ! -L "$DEFAULT" ]; then
    echo "error: this machine has a Slurm of its own, $DEFAULT" >&2
    exit 1
fi
mkdir -p "$FOLDER/state" "$FOLDER/spool" "$(dirname "$DEFAULT")"
ln -sfn "$SLURM_CONF" "$DEFAULT"
[ -f "$FOLDER/munge.key" ] || dd if=/dev/urandom of="$FOLDER/munge.key" bs=1024 count=1 status=none
chmod 400 "$FOLDER/munge.key"
chmod 755 "$FOLDER"
munged --force --key-file="$FOLDER/munge.key" --socket="$FOLDER/munge.socket" --pid-file="$FOLDER/munged.pid" \
    --log-file="$FOLDER/munged.log" --seed-file="$FOLDER/munge.seed"

cat >"$SLURM_CONF" <<END
ClusterName=test
SlurmctldHost=$HOST
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$FOLDER/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=2,batch_sched_delay=0
JobRequeue=1
MinJobAge=300
KillWait=5
ReturnToService=2
SlurmctldPort=26817
SlurmdPort=26818
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool
SlurmctldPidFile=$FOLDER/slurmctld.pid
SlurmdPidFile=$FOLDER/slurmd.pid
SlurmctldLogFile=$FOLDER/slurmctld.log
SlurmdLogFile=$FOLDER/slurmd.log
GresTypes=gpu
NodeName=$HOST CPUs=${CPUS:-2} RealMemory=$(awk '/MemTotal/ {print int($2 / 1100)}' /proc/meminfo) Gres=gpu:8 State=UNKNOWN
PartitionName=cpu Nodes=$HOST Default=YES MaxTime=INFINITE State=UP
END
# Files that count as GPUs: jobs ask for them, nothing is behind them.
touch "$FOLDER"/gpu{0..7}
echo "Name=gpu File=$FOLDER/gpu[0-7]" >"$FOLDER/gres.conf"
slurmctld -f "$SLURM_CONF"
slurmd -f "$SLURM_CONF"
for _ in $(seq 30); do
    if [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ]; then
        echo "export SLURM_CONF=$SLURM_CONF"
        exit
    fi
    sleep 1
done
echo "error: the node is not idle after 30 s; logs are in $FOLDER" >&2
exit 1
