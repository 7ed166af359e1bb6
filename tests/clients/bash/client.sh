#!/usr/bin/env bash
# What the conformance kit talks to: one JSON request a line in, one JSON answer a line out.
# PostgreSQL itself reads the requests and writes the answers; nothing here knows JSON.
set -euo pipefail

coproc PSQL { exec psql -XqAt -v VERBOSITY=sqlstate "$TASKBOARD_DATABASE_URL" 2>&1; }

# say SQL…: run it in our one session; prints what psql prints, up to the mark.
say() {
  local line
  printf '%s\n' "$@" '\echo --' >&"${PSQL[1]}"
  while IFS= read -r line <&"${PSQL[0]}" && [ "$line" != -- ]; do
    printf '%s\n' "$line"
  done
}

# One statement makes another: the call, with each value as a literal whose type is left open, and
# its rows as one line of JSON. The request stands between marks that need no escapes.
call() {
  say "select format(
      'select concat(''{\"rows\": ['', string_agg(row_to_json(r)::text, '', ''), '']}'')
        from (select * from taskboard.%I(%s)) as r',
      q.request ->> 'call',
      (select string_agg(format('%I => %L', a.key, a.value), ', ')
        from json_each_text(q.request -> 'args') as a))
    from (select \$request\$$1\$request\$::json) as q (request) \\gexec"
}

answer() {
  case $1 in
    'ERROR:  '*) printf '{"error": {"sqlstate": "%s"}}\n' "${1#ERROR:  }" ;;
    *) printf '%s\n' "${1:-{\"rows\": []\}}" ;;
  esac
}

# psql looks for notifications after each statement.
wait_for_notification() {
  local seen='' until=$((SECONDS + $1))
  while [ -z "$seen" ] && [ "$SECONDS" -lt "$until" ]; do
    seen=$(say 'do $$ begin perform pg_sleep(0.1); end $$;' | grep '^Asynchronous' || true)
  done
  [ -n "$seen" ] && echo '{"notified": true}' || echo '{"notified": false}'
}

while IFS= read -r request; do
  case $request in
    '{"run": "'*) text=${request#*: \"} && answer "$(say "${text%\"\}};")" ;;
    '{"wait": '*) text=${request#*: } && wait_for_notification "${text%\}}" ;;
    *) answer "$(call "$request")" ;;
  esac
done
