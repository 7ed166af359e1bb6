create or replace function taskboard.check_step(step text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if check_step.step is null then
    raise exception using errcode = '22004', message = 'step must not be null',
      hint = 'Name the effect, for example main or send/2.';
  end if;
  if check_step.step !~ '^[a-z0-9][a-z0-9_./-]{0,99}$' then
    raise exception using errcode = '22023',
      message = 'step has characters that a key cannot carry',
      hint = 'Use 1 to 100 of a-z, 0-9, _ . / and -, beginning with a letter or digit.';
  end if;
end
$$;

comment on function taskboard.check_step(text) is
$$Refuse the name of an effect that is null or no part of a key (internal).
Errors: 22004 null, 22023 no part of a key.$$;

create or replace function taskboard.effect_state(job_id uuid, step text, lease_token uuid)
returns text
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  select case
    when bool_or(coalesce(e.happened, false)) then 'done'
    when bool_or(e.ended_at is null and e.lease_token is distinct from effect_state.lease_token)
      then 'unknown'
    else 'fresh'
  end
  from taskboard.effects as e
  where e.job_id = effect_state.job_id and e.step = effect_state.step
$$;

comment on function taskboard.effect_state(uuid, text, uuid) is
$$Tell what all attempts left of an effect, seen by the owner of a token (internal).
done if any is done, else unknown if another token's record is open, else fresh.$$;

create or replace function taskboard.begin_effect(
  job_id uuid, lease_token uuid, step text default 'main', key_valid_for interval default null)
returns setof taskboard.effect_begun
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_row taskboard.effect_begun;
  v_job record;
  v_now timestamptz;
  v_state text;
  v_first timestamptz;
  v_result jsonb;
  v_key text := begin_effect.job_id || '/' || begin_effect.step;
begin
  if not taskboard.may_touch(begin_effect.job_id, begin_effect.lease_token) then
    return;
  end if;
  perform taskboard.check_step(begin_effect.step);
  perform taskboard.check_span('key_valid_for', begin_effect.key_valid_for, '0', s.delay_most)
  from taskboard.settings as s where begin_effect.key_valid_for is not null;

  -- No evidence arrives meanwhile: it takes the same lock. The row's own will not do, since two of
  -- us that share it and both want more, to hold the job, would block each other.
  perform pg_advisory_xact_lock(1952539510, hashtext(begin_effect.job_id::text));
  select j.attempt, j.on_unknown, j.claimable_at, j.claimed_at + coalesce(j.timeout, s.timeout) as
    timeout_at into v_job
  from taskboard.jobs as j
  cross join taskboard.settings as s
  where j.id = begin_effect.job_id and j.lease_token = begin_effect.lease_token
  for key share of j;
  -- The gate: lock, clock, decide, as in renew. A worker that slept stops here.
  v_now := clock_timestamp();
  if not found or v_job.claimable_at <= v_now or v_job.timeout_at <= v_now then
    perform taskboard.note_refusal('begin_effect', begin_effect.job_id, begin_effect.lease_token);
    return;
  end if;
  v_state := taskboard.effect_state(
    begin_effect.job_id, begin_effect.step, begin_effect.lease_token);
  select min(e.begun_at) into v_first
  from taskboard.effects as e
  where e.job_id = begin_effect.job_id and e.step = begin_effect.step;
  if v_state = 'unknown' and (v_job.on_unknown = 'hold'
    or v_first + taskboard.exact(begin_effect.key_valid_for) <= v_now)
  then
    perform from taskboard.jobs as j
    where j.id = begin_effect.job_id and j.lease_token = begin_effect.lease_token
    for update;
    perform taskboard.hold(begin_effect.job_id, begin_effect.step,
      case when v_job.on_unknown = 'hold' then 'an earlier outcome is unknown'
        else 'an earlier outcome is unknown and its key is no longer valid' end);
    v_row := row(begin_effect.job_id, begin_effect.step, v_key, 'held', null);
    return next v_row;
    return;
  end if;
  if v_state <> 'done' then
    insert into taskboard.effects as e (
      job_id, step, lease_token, attempt, idempotency_key, begun_at)
    values (
      begin_effect.job_id, begin_effect.step, begin_effect.lease_token, v_job.attempt, v_key, v_now)
    on conflict (job_id, step, lease_token)
    do update set ended_at = null, happened = null
    where not e.happened;
    if not found then
      -- Begun before by this token, and perhaps ended while we waited for the record.
      v_state := taskboard.effect_state(
        begin_effect.job_id, begin_effect.step, begin_effect.lease_token);
    end if;
  end if;
  if v_state = 'done' then
    select e.result into v_result
    from taskboard.effects as e
    where e.job_id = begin_effect.job_id and e.step = begin_effect.step and e.happened
    order by e.ended_at
    limit 1;
  end if;
  v_row := row(begin_effect.job_id, begin_effect.step, v_key, v_state, v_result);
  return next v_row;
end
$$;

comment on function taskboard.begin_effect(uuid, uuid, text, interval) is
$$Pass the gate before an effect outside the database.
Commit it before you act.
Zero rows: the lease is not current and unexpired, or past its timeout: do not act.
idempotency_key: job id and step, the same on every attempt; send it along. state: fresh (nobody
began), done (it happened: result tells, do not repeat it), unknown (an earlier attempt began and
never reported: repeat it with the same key), held (an earlier outcome is unknown, and on_unknown
is hold or key_valid_for has passed since the first begin: the job now waits for a person, your
token is void). The same token again gets the same answer again.
Locks the row for key share (renewals pass, a reclaim does not); for update only to hold. Waits for
other calls about effects of this job.
Errors: 22004, 22023. Role: taskboard_worker.$$;

create or replace function taskboard.end_effect(
  job_id uuid, lease_token uuid, step text default 'main', happened boolean default true,
  result jsonb default null)
returns setof taskboard.effect_ended
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_row taskboard.effect_ended;
  v_held_step text;
begin
  if not taskboard.may_touch(end_effect.job_id, end_effect.lease_token) then
    return;
  end if;
  perform taskboard.check_step(end_effect.step);
  if end_effect.happened is null then
    raise exception using errcode = '22004', message = 'happened must not be null',
      hint = 'true: it took place. false: it was refused before it took place.';
  end if;
  perform taskboard.check_document('result', end_effect.result, s.payload_bytes)
  from taskboard.settings as s;

  v_held_step := taskboard.lock_for_evidence(end_effect.job_id);
  -- First evidence stays, but false gives way to true: after done nobody is told fresh.
  update taskboard.effects as e
  set ended_at = clock_timestamp(), happened = end_effect.happened, result = end_effect.result
  where e.job_id = end_effect.job_id and e.step = end_effect.step
    and e.lease_token = end_effect.lease_token
    and (e.ended_at is null or (not e.happened and end_effect.happened));
  if not found and not exists (
    select from taskboard.effects as e
    where e.job_id = end_effect.job_id and e.step = end_effect.step
      and e.lease_token = end_effect.lease_token)
  then
    perform taskboard.note_refusal('end_effect', end_effect.job_id, end_effect.lease_token);
    return;
  end if;
  if v_held_step = end_effect.step
    and taskboard.effect_state(end_effect.job_id, end_effect.step, null) <> 'unknown'
  then
    perform taskboard.free_held(end_effect.job_id);
    perform taskboard.note_incident(
      'evidence_arrived', end_effect.job_id, detail => format(
        '%s happened: %s', end_effect.step,
        case when end_effect.happened then 'yes' else 'no' end));
  end if;
  v_row := row(
    end_effect.job_id, end_effect.step,
    taskboard.effect_state(end_effect.job_id, end_effect.step, end_effect.lease_token));
  return next v_row;
end
$$;

comment on function taskboard.end_effect(uuid, uuid, text, boolean, jsonb) is
$$Testify that an effect took place, or was refused before it did.
Needs the token that began it, not the current lease: late evidence is welcome, also when the job
was reclaimed, held or has ended. Evidence about the question of a held job frees the job.
result: what the other side answered; begin_effect tells it to later attempts.
A repeat changes nothing; true may correct false, never the reverse. state: what the step is now.
Zero rows: this token never began this step.
Locks the job's row, live or finished, for key share (for update if it is held).
Errors: 22004, 22023. Role: taskboard_worker.$$;

create or replace function taskboard.lock_for_evidence(job_id uuid)
returns text
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_held_step text;
begin
  -- One witness at a time: two that both hold the row and both want more would block each other.
  perform pg_advisory_xact_lock(1952539510, hashtext(lock_for_evidence.job_id::text));
  -- Twice: between our looks the job may have moved to history, or back.
  for v_round in 1..2 loop
    select j.held_step into v_held_step
    from taskboard.jobs as j
    where j.id = lock_for_evidence.job_id and j.waits_for = 'person'
    for update;
    if found then
      return v_held_step;
    end if;
    select j.held_step into v_held_step
    from taskboard.jobs as j
    where j.id = lock_for_evidence.job_id
    for key share;
    if found then
      if v_held_step is not null then -- held in the moment between
        perform from taskboard.jobs as j where j.id = lock_for_evidence.job_id for update;
      end if;
      return v_held_step;
    end if;
    perform from taskboard.history as h where h.id = lock_for_evidence.job_id for key share;
    if found then
      return null;
    end if;
  end loop;
  return null;
end
$$;

comment on function taskboard.lock_for_evidence(uuid) is
$$Lock a job's row before evidence about its effects (internal).
Live or finished. Returns the step it is held for, if it is. Taken before the effects are
written, so that whoever holds a job sees evidence that arrives at that moment.$$;
