create or replace function taskboard.wait_for(job_id uuid, at_most interval default '30 seconds')
returns setof taskboard.job_result
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
#variable_conflict use_column
declare
  v_until timestamptz;
  v_pause double precision := 0.005;
begin
  if wait_for.job_id is null or wait_for.at_most is null then
    raise exception using errcode = '22004', message = 'job_id and at_most must not be null',
      hint = 'Name the job, and how long to wait.';
  end if;
  v_until := clock_timestamp()
    + taskboard.check_span('at_most', wait_for.at_most, '0', '5 minutes');
  if not taskboard.may_see(wait_for.job_id) then
    return;
  end if;
  loop
    return query
    select h.id, h.state, h.result, h.error
    from taskboard.history as h
    where h.id = wait_for.job_id
    order by h.finished_at desc
    limit 1;
    exit when found or clock_timestamp() >= v_until;
    -- Each look is a statement of its own and sees what has been committed since.
    perform pg_sleep(least(v_pause, extract(epoch from v_until - clock_timestamp())));
    v_pause := least(v_pause * 1.5, 0.5);
  end loop;
end
$$;

comment on function taskboard.wait_for(uuid, interval) is
$$Wait until a job has ended and return its result.
Zero rows when it has not ended in time.
at_most: 0 to 5 minutes. Looks every few milliseconds at first, later twice a second. At read
committed only, and outside the transaction that enqueued the job: nobody can run it before that
commits. Errors: 22004, 22023. Role: taskboard_producer.$$;
