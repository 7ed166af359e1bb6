create or replace function taskboard.jobs_with_key(
  key text, before uuid default null, max_jobs integer default 1000)
returns setof taskboard.job_list
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = on
set jit = off
as $$
declare
  v_ids uuid[];
begin
  perform taskboard.check_name('key', jobs_with_key.key);
  if jobs_with_key.max_jobs is null or jobs_with_key.max_jobs not between 1 and 1000 then
    raise exception using errcode = '22023', message = 'max_jobs is out of bounds',
      hint = 'Give 1 to 1000.';
  end if;
  -- Of live jobs the tables of keys know; what has ended stands in the index of its day's keys.
  v_ids := array(
    select found.id
    from (
      select u.job_id as id
      from taskboard.lanes as l
      join taskboard.unique_keys as u on u.kind = l.kind and u.key = jobs_with_key.key
      union
      select s.turn_of from taskboard.serial_keys as s where s.key = jobs_with_key.key
      union
      select j.id
      from taskboard.jobs as j
      where j.serial_key = jobs_with_key.key and j.waits_for is not null
      union
      select h.id
      from taskboard.history as h
      where h.unique_key = jobs_with_key.key
      union
      select h.id
      from taskboard.history as h
      where h.serial_key = jobs_with_key.key) as found
    where jobs_with_key.before is null or found.id < jobs_with_key.before
    order by found.id desc
    limit jobs_with_key.max_jobs);
  return query
  select v.* from taskboard.job_list as v
  where v.job_id = any (v_ids)
  order by v.job_id desc;
end
$$;

comment on function taskboard.jobs_with_key(text, uuid, integer) is
$$List the jobs that have a key, as unique_key or as serial_key.
Live and finished ones, the newest first, at most max_jobs, of those before an id; rows of job_list.
Reads all jobs with the key and hardly any others. A live job whose unique key was let go at its
claim is not found by it. Errors: 22004, 22023. Roles: taskboard_operator, taskboard_observer.$$;
