-- Install or upgrade Taskboard with psql alone: psql -f sql/install.sql
-- Everything in one transaction; running it again changes nothing.
\set ON_ERROR_STOP on
begin;
set local search_path = pg_catalog, pg_temp;
do $$ begin perform pg_advisory_xact_lock(1952539508, 0); end $$;
-- Workers would queue behind a change that waits for somebody else's transaction: not for long.
set local lock_timeout = '1s';
do $$
begin
  if exists (
    select from pg_namespace as n
    where n.nspname = 'taskboard'
      and pg_get_userbyid(n.nspowner) not in (current_user, 'taskboard_owner'))
  then
    raise exception 'the schema taskboard belongs to somebody else'
      using hint = 'Install as its owner, or drop it if it is not Taskboard''s.';
  end if;
end
$$;
\ir ../migrations/0001_tables.sql
\ir 00_dictionary.sql
\ir 00_dropped.sql
\ir 01_version.sql
\ir 02_arguments.sql
\ir 03_incidents.sql
\ir 04_keys.sql
\ir 05_finish.sql
\ir 06_inline.sql
\ir 07_rights.sql
\ir 10_enqueue.sql
\ir 11_enqueue_many.sql
\ir 12_wake.sql
\ir 20_claim.sql
\ir 21_renew.sql
\ir 22_require_lease.sql
\ir 23_lease_status.sql
\ir 24_next_claimable_at.sql
\ir 25_limits.sql
\ir 26_floor.sql
\ir 27_pick_jobs.sql
\ir 28_part_waiting.sql
\ir 30_complete.sql
\ir 31_fail.sql
\ir 32_release.sql
\ir 33_effects.sql
\ir 40_cancel.sql
\ir 41_retry.sql
\ir 42_resolve.sql
\ir 43_evict.sql
\ir 44_queues.sql
\ir 45_schedules.sql
\ir 46_settings.sql
\ir 47_wait_for.sql
\ir 50_maintain.sql
\ir 60_views.sql
\ir 61_count_ready.sql
\ir 62_jobs_with_key.sql
\ir 90_grants.sql
\ir 99_checks.sql
commit;
