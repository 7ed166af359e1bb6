create or replace function taskboard.configure(setting text, value text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
declare
  v_new taskboard.settings;
begin
  if configure.setting is null or configure.value is null then
    raise exception using errcode = '22004', message = 'setting and value must not be null',
      hint = 'For example: configure(''history'', ''30 days'').';
  end if;
  select s.* into v_new from taskboard.settings as s for update;
  if not exists (select from taskboard.setting_list as l where l.setting = configure.setting) then
    raise exception using errcode = '22023', message = 'no such setting',
      hint = 'Settings: ' || (
        select string_agg(l.setting, ', ' order by l.setting)
        from taskboard.setting_list as l) || '.';
  end if;
  begin
    v_new := jsonb_populate_record(v_new, jsonb_build_object(configure.setting, configure.value));
    update taskboard.settings as s
    set lease = taskboard.exact(v_new.lease), timeout = taskboard.exact(v_new.timeout),
      max_attempts = v_new.max_attempts, max_lost_leases = v_new.max_lost_leases,
      backoff = taskboard.exact(v_new.backoff), backoff_max = taskboard.exact(v_new.backoff_max),
      payload_bytes = v_new.payload_bytes, error_bytes = v_new.error_bytes,
      claim_jobs = v_new.claim_jobs, bulk_jobs = v_new.bulk_jobs,
      lanes_most = v_new.lanes_most,
      lease_least = taskboard.exact(v_new.lease_least),
      lease_most = taskboard.exact(v_new.lease_most),
      delay_most = taskboard.exact(v_new.delay_most), history = taskboard.exact(v_new.history),
      incidents_per_minute = v_new.incidents_per_minute, notify = v_new.notify,
      shard = v_new.shard;
  exception
    when check_violation or not_null_violation or invalid_text_representation
      or invalid_datetime_format or datetime_field_overflow or numeric_value_out_of_range
      or interval_field_overflow
    then
      raise exception using errcode = '22023',
        message = format('not a value for %s', configure.setting),
        hint = 'Counts and durations are positive, durations like 90 s, 36 hours or 30 days;'
          ' shard is 0 to 65535.';
  end;
end
$$;

comment on function taskboard.configure(text, text) is
$$Change a setting of this database: a default or a limit.
setting: one of the columns of taskboard.settings. value: as text, say 10 or 30 days.
Errors: 22004, 22023 with the names of all settings. Role: taskboard_operator.$$;

create or replace function taskboard.keep_history(
  queue text, completed boolean default true, failed_for interval default null)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
#variable_conflict use_column
declare
  v_failed interval;
begin
  perform taskboard.check_name('queue', keep_history.queue);
  if keep_history.completed is null then
    raise exception using errcode = '22004', message = 'completed must not be null',
      hint = 'false keeps nothing of completed jobs but id and token, for an hour.';
  end if;
  v_failed := taskboard.check_span('failed_for', keep_history.failed_for, '0', '876000 hours');
  insert into taskboard.queues as q (name, keep_completed, keep_failed)
  values (keep_history.queue, keep_history.completed, v_failed)
  on conflict (name) do update
  set keep_completed = excluded.keep_completed, keep_failed = excluded.keep_failed;
  update taskboard.lanes as l
  set keeps = keep_history.completed
  where l.queue = keep_history.queue and l.keeps <> keep_history.completed;
end
$$;

comment on function taskboard.keep_history(text, boolean, interval) is
$$Say what a queue keeps of finished jobs, instead of settings.history.
completed false: of a completed job only id and token stay, for an hour, so that a repeated
completion is still answered. failed_for: failed jobs stay that long when the rest has gone.
Errors: 22004, 22023. Role: taskboard_operator.$$;
