create or replace function taskboard.resolve(
  job_id uuid, step text, happened boolean, reason text default null)
returns setof taskboard.job_state
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
declare
  v_row taskboard.job_state;
  v_held_step text;
  v_state text;
begin
  perform taskboard.check_step(resolve.step);
  if resolve.job_id is null or resolve.happened is null then
    raise exception using errcode = '22004', message = 'job_id and happened must not be null',
      hint = 'Say whether the effect took place.';
  end if;
  loop
    perform from taskboard.jobs as j where j.id = resolve.job_id for update;
    if found then
      select j.held_step, j.state into v_held_step, v_state
      from taskboard.live_jobs as j
      where j.id = resolve.job_id;
      exit;
    end if;
    v_state := taskboard.finished_state(resolve.job_id);
    exit when v_state is not null; -- else it came back between our looks
  end loop;
  if v_held_step is distinct from resolve.step then
    -- The same answer again, or evidence that came first, is no mistake.
    if taskboard.effect_state(resolve.job_id, resolve.step, null)
      = (case when resolve.happened then 'done' else 'fresh' end)
      and exists (
        select from taskboard.effects as e
        where e.job_id = resolve.job_id and e.step = resolve.step)
    then
      v_row := row(resolve.job_id, v_state);
      return next v_row;
      return;
    end if;
    raise exception using errcode = 'TB003',
      message = 'the job is not held for this step',
      hint = coalesce('It is held for the step ' || v_held_step || '.', 'It is not held.');
  end if;
  update taskboard.effects as e
  set ended_at = clock_timestamp(), happened = resolve.happened
  where e.job_id = resolve.job_id and e.step = resolve.step and e.ended_at is null;
  perform taskboard.free_held(resolve.job_id);
  perform taskboard.note_incident(
    'job_resolved', resolve.job_id,
    detail => concat_ws('; ', format('%s happened: %s', resolve.step,
      case when resolve.happened then 'yes' else 'no' end), resolve.reason));
  v_row := row(resolve.job_id, 'ready');
  return next v_row;
end
$$;

comment on function taskboard.resolve(uuid, text, boolean, text) is
$$Answer a held job's question; the job becomes ready.
happened true: the step is done and is not repeated. false: the step is fresh, the next attempt
performs it. The same answer again changes nothing. reason: kept with the incident.
Errors: 22004, 22023, TB002 no such job, TB003 not held for this step. Role: taskboard_operator.$$;
