create or replace function taskboard.count_ready(
  queues text[] default null, out kind text, out jobs bigint)
returns setof record
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
begin
  perform taskboard.check_names(count_ready.queues, null);
  return query
  select s.kind, sum(s.ready + s.expired)::bigint
  from taskboard.queue_stats as s
  where count_ready.queues is null or s.queue = any (count_ready.queues)
  group by s.kind
  having sum(s.ready + s.expired) > 0;
end
$$;

comment on function taskboard.count_ready(text[]) is
$$Count the jobs that could be claimed now, by kind.
What a runner says at its start of kinds that it has no handler for. queues: null means all. As in
queue_stats, 10,000 of a lane mean that many or more. Errors: 22004, 22023. Role:
taskboard_worker.$$;
