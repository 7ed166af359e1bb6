#!/usr/bin/env bash
# A complete Taskboard worker: bash and psql. Copy it, and put your own work into `work`.
#
#   TASKBOARD_DATABASE_URL=postgresql://… TASKBOARD_QUEUE=default bash worker.sh
set -uo pipefail

queue=${TASKBOARD_QUEUE:-default}
kinds='{kit}' # what `work` knows to do; other kinds are left to others
stopping='' child=''
tmp=$(mktemp -d)
# Not by a child that is killed while it is still a copy of us.
trap '[ "$BASHPID" != $$ ] || rm -rf "$tmp"' EXIT

# Your work, in a process of its own. Prints its result, a JSON document; a failure is a code other
# than 0, and what it printed on standard error. It is stopped by SIGTERM.
work() {
  local fail
  sleep "$(field seconds)"
  fail=$(field fail)
  if [ -n "$fail" ]; then
    printf '%s\n' "$fail" >&2
    return 1
  fi
  cat "$tmp/payload"
}

# field NAME: a field of the payload, which PostgreSQL takes apart.
field() {
  ask 60 "\\set payload \`cat $tmp/payload\`
    select :'payload'::jsonb ->> '$1'"
}

# ask SECONDS SQL: rows as lines, columns parted by tabs. A call without an answer is sent again:
# that is safe, since a claim whose answer was lost lapses, and everything else carries its token.
ask() {
  local until=$((SECONDS + $1))
  until psql -XqAt -F $'\t' -v ON_ERROR_STOP=1 -v queue="$queue" -v kinds="$kinds" \
    "$TASKBOARD_DATABASE_URL" <<<"$2"; do
    [ "$SECONDS" -lt "$until" ] || return 1
    sleep 0.2
  done
}

# watch: until the work has ended, renew every third of the lease; stop the work and say why if that
# is refused. The variables are those of `attempt`.
watch() {
  while kill -0 "$child" 2>/dev/null; do
    sleep "$third" &
    wait -n "$child" $!
    kill $! 2>/dev/null && continue # the work has ended, or a signal came
    row=$(ask $((${third%.*} + 1)) "select cancel_requested from taskboard.renew('$job', '$token')")
    case $row in
      f) continue ;;
      t) why=cancelled ;;
      *) why=lost ;; # zero rows, or no answer in time: somebody else may be at it by now
    esac
    halt
    return
  done
}

# Do one job, say what became of it. No line from a call is zero rows: it was no longer ours.
attempt() {
  local job=$1 token=$2 third=$3 why='' code=143 row
  if [ -z "$stopping" ]; then
    set -m # so that the work is a group, which can be ended as a whole
    work >"$tmp/result" 2>"$tmp/error" &
    child=$!
    set +m
    watch
    wait "$child"
    code=$?
    child=''
  fi
  if [ "$why" = lost ]; then
    printf 'lost %s\n' "$job" # record nothing: that is for the new owner to do
    return
  elif [ "$why" = cancelled ] || { [ -n "$stopping" ] && [ "$code" -gt 128 ]; }; then
    # Given back; after a cancel that ends the job.
    row=$(ask 60 "select case state when 'cancelled' then state else 'released' end
      from taskboard.release('$job', '$token')") || exit 1
  elif [ "$code" = 0 ]; then
    row=$(ask 60 "\\set result \`cat $tmp/result\`
      select 'completed' from taskboard.complete('$job', '$token', :'result')") || exit 1
  else
    row=$(ask 60 "\\set error \`tail -c 8000 $tmp/error | iconv -ct utf-8\`
      select 'failed' from taskboard.fail('$job', '$token', :'error')") || exit 1
  fi
  printf '%s %s\n' "${row:-lost}" "$job"
}

halt() {
  [ -z "$child" ] || kill -- -"$child" 2>/dev/null
}

trap 'stopping=1; halt' TERM
while [ -z "$stopping" ]; do
  # A document has no tabs and no line ends of its own: in JSON they are escapes.
  row=$(ask 60 "select job_id, lease_token, extract(epoch from lease)::numeric(9, 2) / 3, payload
    from taskboard.claim(queues => array[:'queue'], kinds => :'kinds')") || exit 1
  if [ -n "$row" ]; then
    IFS=$'\t' read -r job token third payload <<<"$row"
    printf '%s' "$payload" >"$tmp/payload"
    attempt "$job" "$token" "${third:0:6}"
  else
    sleep 1 &
    wait $!
  fi
done
exit 0 # not what the rest answered that the signal ended
