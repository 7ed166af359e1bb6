create or replace function taskboard.wait_for(job_id uuid, at_most interval default '30 seconds')
returns setof taskboard.job_result
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_began timestamptz := clock_timestamp();
  v_until timestamptz;
  v_now timestamptz;
begin
  if wait_for.job_id is null or wait_for.at_most is null then
    raise exception using errcode = '22004', message = 'job_id and at_most must not be null',
      hint = 'Name the job, and how long to wait.';
  end if;
  v_until := v_began
    + taskboard.check_span('at_most', wait_for.at_most, '0', '5 minutes');
  loop
    -- Each look is a statement of its own and sees what has been committed since. It ends by
    -- raising, which lets go of all its locks: while we sleep, retention is to get its own.
    begin
      if not taskboard.may_see(wait_for.job_id) then
        return;
      end if;
      if not exists (select from taskboard.jobs as j where j.id = wait_for.job_id) then
        return query
        select h.id, h.state::text, h.result, h.error
        from taskboard.history as h
        where h.id = wait_for.job_id
        order by h.finished_at desc
        limit 1;
        exit when found;
      end if;
      raise exception using message = 'lets the locks go';
    exception
      when raise_exception then
        null;
    end;
    v_now := clock_timestamp();
    exit when v_now >= v_until;
    perform pg_sleep(extract(epoch from least(
      greatest((v_now - v_began) / 10, make_interval(secs => 0.005)),
      make_interval(secs => 0.25), v_until - v_now)));
  end loop;
end
$$;

comment on function taskboard.wait_for(uuid, interval) is
$$Wait until a job has ended and return its result.
Zero rows when it has not ended in time.
at_most: 0 to 5 minutes. At read committed only, and outside the transaction that enqueued the job:
nobody can run it before that commits.
Looks again after 5 ms, or a tenth of the time it has waited, or 0.25 s: no answer is later by more.
It looks, because to be notified would cost everybody more: commits that notify take turns in all of
the database, which cost half of the completions per second where we measured it. A look takes 30 to
40 microseconds of the waiting session alone, a completion pays nothing, any pooler will do.
A call holds its connection for as long as it waits. Where many wait, let them share a few: ask with
at_most => '0' from a pool, every so often, and give the connection back in between.
Errors: 22004, 22023. Role: taskboard_producer.$$;
