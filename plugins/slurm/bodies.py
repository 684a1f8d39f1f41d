r"""The fixed parts of the scripts, in bash, without any values of a run.

The job, on the first of its nodes:

    batch shell ── srun ── composer-mesh worker, one on each node
                └─ composer-mesh train, the controller

SIGTERM reaches the batch shell for one of three reasons. The job's Slurm state and the file
`stopping` distinguish them:

    COMPLETING           scancel, a requeue    the end, at once
    RUNNING, stopping    composer-mesh stop    a checkpoint, then the end
    RUNNING              the time limit nears  a checkpoint, then queued again
"""

JOB = r"""
# From here on, every run has the same lines.
set -u
umask 077

say() {
  printf '%s composer-mesh job %s: %s\n' "$(date +%Y-%m-%dT%H:%M:%S)" "$SLURM_JOB_ID" "$1" |
    tee -a "$LAUNCH/controller.log"
}

alive() { kill -0 "$1" 2>/dev/null; }

# A second, or less when a signal comes.
nap() {
  sleep 1 &
  wait "$!"
}

# What Slurm calls this job; nothing where it does not answer.
job_state() {
  local state
  for _ in 1 2 3; do
    state=$(timeout 5 squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)
    if [ -n "$state" ]; then
      echo "$state"
      return
    fi
    nap
  done
}

steps_done() {
  if [ -f "$RUN/metrics.jsonl" ]; then wc -l <"$RUN/metrics.jsonl"; else echo 0; fi
}

# Why a signal came, and how many seconds the controller has from then on.
heed() {
  local state continues=unknown
  state=$(job_state)
  case $state in
    RUNNING | SIGNALING | RESIZING | SUSPENDED | STOPPED) continues=yes ;;
    COMPLET* | CANCELLED* | FAILED | TIMEOUT | PENDING | REQUEUE* | SPECIAL_EXIT) continues=no ;;
    PREEMPTED | NODE_FAIL | BOOT_FAIL | OUT_OF_MEMORY | DEADLINE | REVOKED) continues=no ;;
  esac
  if [ "$continues" = no ]; then
    why=cancelled ends=$((SECONDS + 3))
    say "the job is $state; everything ends"
  elif [ -e "$LAUNCH/stopping" ]; then
    why=stopped ends=$((SECONDS + 86400)) # who requested it cancels it when that takes too long
    say "a stop was requested; the run writes a checkpoint"
  elif [ "$continues" = yes ]; then
    why=limit ends=$((SECONDS + PATIENCE_S))
    say "the job ends soon, by its time limit or for another job; the run writes a checkpoint"
  else
    why=unsure ends=$((SECONDS + PATIENCE_S))
    say "a signal came, and Slurm says '$state' of the job; the run writes a checkpoint and ends"
  fi
}

wait_for_workers() {
  local end=$((SECONDS + $1))
  while alive "$workers" && [ "$SECONDS" -lt "$end" ]; do nap; done
}

# First with SIGTERM to all that runs on the nodes; ending srun itself would send SIGKILL.
end_workers() {
  alive "$workers" && timeout 5 scancel --signal=TERM "$SLURM_JOB_ID"
  wait_for_workers 5
  alive "$workers" && kill -TERM "$workers"
  wait_for_workers 3
  alive "$workers" && kill -KILL "$workers"
}

# The same job once more, behind the others. A run that makes no step in a whole job ends instead.
queue_again() {
  local now before=none next
  now=$(steps_done)
  [ -f "$LAUNCH/queued-again-at" ] && before=$(<"$LAUNCH/queued-again-at")
  if [ "$now" = "$before" ]; then
    say "no step was finished since the job was last queued again, at step $now: it is not queued \
again; raise cluster.slurm.time_limit and launch with --resume"
    exit 1
  fi
  printf '%s\n' "$now" >"$LAUNCH/queued-again-at"
  say "queued again after step $now"
  if timeout 30 scontrol requeue "$SLURM_JOB_ID"; then exit 0; fi
  if next=$(timeout 30 sbatch --parsable --dependency="afterany:$SLURM_JOB_ID" "$LAUNCH/job.sbatch")
  then
    printf '%s\n' "${next%%;*}" >"$LAUNCH/slurm-job"
    say "Slurm requeues no job here; submitted job ${next%%;*} to continue"
    exit 0
  fi
  say "Slurm took neither a requeue nor a new job; continue with composer-mesh launch --resume"
  exit 1
}

signals=0 heeded=0 why="" ends=0
trap 'signals=$((signals + 1))' TERM

printf '%s\n' "$SLURM_JOB_ID" >"$LAUNCH/slurm-job"
if [ -e "$LAUNCH/stopping" ]; then
  say "a stop of the run was requested, so nothing starts"
  exit 0
fi
rm -f "$RUN"/hosts/*.json # who announced itself in an earlier job is gone

overlap=()
if srun --help 2>/dev/null | grep -q -e --overlap; then overlap=(--overlap); fi
say "start $((${SLURM_RESTART_COUNT:-0} + 1)) on $SLURM_JOB_NODELIST"

# Host i of the run is node i of the job. Expanded there, so:
# shellcheck disable=SC2016
node='
  hosts=($0) log=$1
  shift
  name=${hosts[SLURM_PROCID]}
  exec "$@" --name "$name" </dev/null >>"$log/worker-$name.log" 2>&1
'
srun --nodes="${#HOSTS[@]}" --ntasks="${#HOSTS[@]}" --ntasks-per-node=1 "${overlap[@]}" \
  --kill-on-bad-exit=0 --no-kill --wait=0 --cpu-bind=none --input=none \
  bash -c "$node" "${HOSTS[*]}" "$LAUNCH" "${WORKER[@]}" &
workers=$!

PYTHONUNBUFFERED=1 "${CONTROLLER[@]}" </dev/null >>"$LAUNCH/controller.log" 2>&1 &
controller=$!

while alive "$controller"; do
  if [ "$signals" != "$heeded" ]; then
    heeded=$signals
    [ -z "$why" ] && kill -TERM "$controller"
    heed
  elif [ -z "$why" ] && ! alive "$workers"; then
    why=alone ends=$((SECONDS + 60)) # of a run that has given them back: it ends by itself
  fi
  if [ -n "$why" ] && [ "$SECONDS" -ge "$ends" ]; then
    say "the controller does not end (${why}): it is killed"
    kill -KILL "$controller"
  fi
  nap
done
seen=none
until [ "$seen" = "$signals" ]; do # a signal cuts a wait short, with a status of its own
  seen=$signals
  wait "$controller"
  status=$?
done
if [ "$signals" != "$heeded" ]; then heed; fi

if [ "$status" = 0 ]; then wait_for_workers 10; fi # they have been given back
end_workers
if [ "$status" = 0 ]; then
  say "the run has finished"
  exit 0
fi
case $why:$status in
  :130 | :143 | stopped:130 | stopped:143) # the first two: composer-mesh stop called the controller
    say "the run has stopped after step $(steps_done)"
    exit 0
    ;;
  limit:130 | limit:137 | limit:143)
    if [ "$RESUBMIT" = yes ]; then queue_again; fi
    say "the time was over after step $(steps_done); continue with composer-mesh launch --resume"
    ;;
  *) say "the controller ended with status $status" ;;
esac
exit "$status"
"""

REACH = r"""
# Runs a command next to the controller of this run: reach.sh PROGRAM ARGUMENT...
set -u

job=$(cat "$JOB_FILE") || exit 75
found=$(squeue --noheader --jobs="$job" --format='%T %B') || found=
state=${found%% *} node=${found##* }
if [ "$state" != RUNNING ]; then
  echo "job $job is ${state:-not in the queue}, so there is no controller to reach: wait until it \
runs, or look at the files of the run" >&2
  exit 75
fi
share=(--mem=0) # before there was --overlap, a step without memory of its own always found room
if srun --help 2>/dev/null | grep -q -e --overlap; then share=(--overlap); fi
terminal=()
if [ -t 0 ] && [ -t 1 ]; then terminal=(--pty); fi
# shellcheck disable=SC2016 # expanded on the node
exec srun --jobid="$job" --nodes=1 --ntasks=1 --nodelist="$node" --chdir="$FOLDER" --gres=none \
  --quiet "${share[@]}" "${terminal[@]}" \
  bash -c '{ eval "$0"; } >&2; exec "$@"' "$SETUP" "$@"
"""
