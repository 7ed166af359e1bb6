#!/usr/bin/env bash
# What the conformance kit talks to: one JSON request a line in, one JSON answer a line out.
# PostgreSQL itself reads the requests and writes the answers; nothing here knows JSON.
set -euo pipefail

coproc PSQL { exec psql -XqAt -v VERBOSITY=sqlstate "$TASKBOARD_DATABASE_URL" 2>&1; }
exec {to}>&"${PSQL[1]}" {from}<&"${PSQL[0]}" # so that subshells have them, too

# say SQL: run it in our one session; prints what psql prints, up to the mark.
say() {
  local line
  printf '%s\n\\echo --\n' "$1" >&"$to"
  while IFS= read -r line <&"$from"; do
    [ "$line" != -- ] || return 0
    printf '%s\n' "$line"
  done
  return 1
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

# psql looks for notifications after each statement.
notified() {
  local until=$((SECONDS + $1))
  while [ "$SECONDS" -lt "$until" ]; do
    case $(say 'do $$ begin perform pg_sleep(0.1); end $$;') in
      Asynchronous*) printf true && return ;;
    esac
  done
  printf false
}

while IFS= read -r request; do
  text=${request#*: }
  text=${text%\}}
  case $request in
    '{"wait": '*) found="{\"notified\": $(notified "$text")}" ;;
    '{"run": '*) found=$(say "${text:1:-1};") ;;
    *) found=$(call "$request" | sed '/^Asynchronous/d') ;;
  esac
  case $found in
    'ERROR:  '*) printf '{"error": {"sqlstate": "%s"}}\n' "${found#ERROR:  }" ;;
    *) printf '%s\n' "${found:-{\"rows\": []\}}" ;;
  esac
done
