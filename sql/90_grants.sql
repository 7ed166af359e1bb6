set local search_path = pg_catalog, pg_temp;

-- The whole privilege matrix. What is not named here may be called by the owner alone.
-- Roles belong to the cluster; where this installer may not create them, it says what to run.
-- On the rest nobody but the owner has any right. A test compares these lines with the catalog:
-- tables: migrations settings lanes queues queue_starts queue_rights jobs unique_keys serial_keys
-- tables: history history_default effects schedules incidents
-- sequences: lane_ids incidents_id_seq
-- views: live_jobs
-- types: enqueued claimed renewed renewed_many completed given_back leased effect_begun
-- types: effect_ended job_state queue_state job_result due_schedule maintained final_state
-- A type, because a column of it would stand in the way of a migration or of dropping a day.
do $$
declare
  v_matrix constant text := $matrix$
    version              producer worker operator observer
    job                  producer worker operator observer
    may_use              producer worker operator observer
    enqueue              producer
    enqueue_many         producer
    claim                worker
    renew                worker
    renew_many           worker
    complete             worker
    complete_many        worker
    fail                 worker
    fail_many            worker
    release              worker
    release_many         worker
    require_lease        worker
    lease_status         worker
    begin_effect         worker
    end_effect           worker
    next_claimable_at    worker
    count_ready          worker
    listen               worker
    unlisten             worker
    maintain             worker operator
    cancel               producer operator
    retry                operator
    retry_failed         operator
    resolve              operator
    evict                operator
    pause                operator
    resume               operator
    prune                operator
    limit_queue          operator
    keep_history         operator
    configure            operator
    schedule             operator
    unschedule           operator
    pause_schedule       operator
    due_schedules        worker
    advance_schedule     worker
    wait_for             producer
    job_documents        operator
    jobs_with_key        operator observer
    job_list             operator observer
    queue_stats          worker operator observer
    queue_list           worker operator observer
    worker_list          operator observer
    incident_list        operator observer
    effect_list          operator observer
    schedule_list        operator observer
    setting_list         operator observer
    queue_rates          operator observer
  $matrix$;
  v_role text;
  v_row text[];
  v_missing text[] := '{}';
  v_object record;
begin
  foreach v_role in array array['owner', 'producer', 'worker', 'operator', 'observer'] loop
    continue when to_regrole('taskboard_' || v_role) is not null;
    begin
      execute format('create role %I nologin', 'taskboard_' || v_role);
    exception
      when duplicate_object or unique_violation then
        null; -- another database of this cluster installs at this moment
      when insufficient_privilege then
        -- An owner whom this installer may not become would change nothing.
        continue when v_role = 'owner';
        v_missing := v_missing || format('create role taskboard_%s nologin;', v_role);
    end;
  end loop;
  if cardinality(v_missing) > 0 then
    raise notice 'roles are missing, so only the installing role may use Taskboard'
      using hint = concat_ws(E'\n', 'Let an administrator run:', array_to_string(v_missing, E'\n'),
        'Then run taskboard migrate again, or install.sql.');
  end if;

  revoke all on schema taskboard from public;
  revoke all on all tables in schema taskboard from public;
  revoke all on all sequences in schema taskboard from public;
  revoke all on all functions in schema taskboard from public;
  for v_role in
    select rolname from pg_roles
    where rolname in (
      'taskboard_producer', 'taskboard_worker', 'taskboard_operator', 'taskboard_observer')
    order by rolname
  loop
    execute format('revoke all on schema taskboard from %I', v_role);
    execute format('revoke all on all tables in schema taskboard from %I', v_role);
    execute format('revoke all on all sequences in schema taskboard from %I', v_role);
    execute format('revoke all on all functions in schema taskboard from %I', v_role);
    execute format('grant usage on schema taskboard to %I', v_role);
  end loop;
  for v_row in
    select regexp_split_to_array(trim(line), '\s+')
    from regexp_split_to_table(trim(v_matrix), '\n') as line
  loop
    foreach v_role in array v_row[2:] loop
      continue when to_regrole('taskboard_' || v_role) is null;
      execute format(
        case when to_regclass('taskboard.' || v_row[1]) is null
          then 'grant execute on function taskboard.%I to %I'
          else 'grant select on taskboard.%I to %I' end,
        v_row[1], 'taskboard_' || v_role);
    end loop;
  end loop;

  for v_object in
    select format('revoke all on type %s from %s', t.oid::regtype,
      case when a.grantee = 0 then 'public' else a.grantee::regrole::text end) as change
    from pg_type as t
    cross join lateral aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) as a
    where t.typnamespace = 'taskboard'::regnamespace and t.typcategory <> 'A'
      and a.grantee <> t.typowner
  loop
    execute v_object.change;
  end loop;

  -- taskboard_owner owns everything where this installer may become it.
  if not (select r.rolsuper from pg_roles as r where r.rolname = current_user) then
    return;
  end if;
  if (select n.nspowner from pg_namespace as n where n.nspname = 'taskboard')
    <> 'taskboard_owner'::regrole
  then
    alter schema taskboard owner to taskboard_owner;
  end if;
  for v_object in
    select format('alter function %s owner to taskboard_owner', p.oid::regprocedure) as change
    from pg_proc as p
    where p.pronamespace = 'taskboard'::regnamespace and p.proowner <> 'taskboard_owner'::regrole
    union all
    select format('alter type %s owner to taskboard_owner', t.oid::regtype)
    from pg_type as t
    left join pg_class as c on c.oid = t.typrelid
    where (c.relkind = 'c' or t.typtype = 'd')
      and t.typnamespace = 'taskboard'::regnamespace and t.typowner <> 'taskboard_owner'::regrole
    union all
    select format('alter table %s owner to taskboard_owner', c.oid::regclass)
    from pg_class as c
    where c.relnamespace = 'taskboard'::regnamespace
      and c.relkind in ('r', 'p', 'v', 'S') and c.relowner <> 'taskboard_owner'::regrole
      and c.relname !~ '^(_?yoyo)'
      and not exists (
        select from pg_depend as d
        where d.objid = c.oid and d.classid = 'pg_class'::regclass and d.deptype in ('a', 'i')
          and c.relkind = 'S')
  loop
    execute v_object.change;
  end loop;
end
$$;
