-- The tables, types and indexes of Taskboard. Every statement may be run again.
-- Locks: none that a running worker would notice (everything here is new).

create schema if not exists taskboard;

create table if not exists taskboard.migrations (
  name text not null,
  checksum text,
  applied_at timestamptz not null default clock_timestamp(),
  constraint migrations_key primary key (name)
);

create table if not exists taskboard.settings (
  one_row boolean not null default true,
  lease interval not null default '60 seconds',
  timeout interval not null default '1 hour',
  max_attempts integer not null default 20,
  max_lost_leases integer not null default 5,
  backoff interval not null default '5 seconds',
  backoff_max interval not null default '1 hour',
  payload_bytes integer not null default 1048576,
  error_bytes integer not null default 8192,
  claim_jobs integer not null default 1000,
  bulk_jobs integer not null default 100000,
  lanes_most integer not null default 10000,
  lease_least interval not null default '0.1 seconds',
  lease_most interval not null default '24 hours',
  delay_most interval not null default '8784 hours',
  history interval not null default '168 hours',
  incidents_per_minute integer not null default 1000,
  notify boolean not null default true,
  shard integer not null default 0,
  shard_id text not null generated always as (lpad(to_hex(shard), 4, '0')) stored,
  queue_rights boolean not null default false,
  queue_limits boolean not null default false,
  paused_at timestamptz,
  constraint settings_key primary key (one_row),
  constraint settings_one_row check (one_row),
  constraint settings_counts_positive check (
    max_attempts > 0 and max_lost_leases > 0 and payload_bytes > 0 and error_bytes > 0
    and claim_jobs > 0 and bulk_jobs > 0 and lanes_most > 0 and incidents_per_minute >= 0),
  constraint settings_durations_positive check (
    lease > '0' and timeout > '0' and backoff > '0' and backoff_max >= backoff
    and lease_least > '0' and lease_most >= lease_least and delay_most > '0' and history >= '0'),
  constraint settings_durations_bounded check (
    greatest(lease, timeout, backoff_max, lease_most, delay_most, history) <= '876000 hours'),
  constraint settings_shard_fits_id check (shard between 0 and 65535)
);

insert into taskboard.settings (one_row) values (true) on conflict do nothing;

create sequence if not exists taskboard.lane_ids as integer;

create table if not exists taskboard.lanes (
  id integer not null default nextval('taskboard.lane_ids'),
  queue text not null,
  kind text not null,
  priority integer not null,
  "returning" boolean not null,
  returns_to integer not null,
  waits_in integer,
  keeps boolean not null default true,
  lease interval,
  constraint lanes_key primary key (id),
  constraint lanes_priority_bounded check (priority between 0 and 9),
  constraint lanes_fresh_return_elsewhere check ("returning" or returns_to <> id)
);

create index if not exists lanes_named
  on taskboard.lanes (queue, kind, priority, "returning", id);

create table if not exists taskboard.queues (
  name text not null,
  paused_at timestamptz,
  lease interval,
  max_running integer,
  max_starts integer,
  starts_per interval,
  keep_completed boolean not null default true,
  keep_failed interval,
  constraint queues_key primary key (name),
  constraint queues_lease_positive check (lease > '0'),
  constraint queues_limits_sensible check (
    max_running >= 0 and max_starts >= 0 and starts_per > '0'),
  constraint queues_rate_whole check ((max_starts is null) = (starts_per is null))
);

create table if not exists taskboard.queue_starts (
  queue text not null,
  started_at timestamptz not null,
  jobs integer not null,
  constraint queue_starts_key primary key (queue, started_at)
);

create table if not exists taskboard.queue_rights (
  role regrole not null,
  queue text not null,
  constraint queue_rights_key primary key (role, queue)
);

-- Every job leaves two dead rows here: where it stood when it was claimed, and when it ended. A
-- backlog must not put off the vacuum in proportion, and the vacuum must not be slowed down.
create table if not exists taskboard.jobs (
  id uuid not null,
  lane_id integer not null,
  place integer not null default 0,
  attempt integer not null default 0,
  claimable_at timestamptz not null,
  run_at timestamptz not null,
  created_at timestamptz not null,
  claimed_at timestamptz,
  lease_token uuid,
  last_token uuid,
  lease_granted interval,
  lease interval,
  timeout interval,
  failures integer not null default 0,
  lost_leases integer not null default 0,
  max_attempts integer,
  max_lost_leases integer,
  serial_no bigint,
  cancel_requested_at timestamptz,
  unique_until_claim boolean,
  on_unknown text not null default 'retry',
  waits_for text,
  held_step text,
  leased_by text,
  lapsed_by text,
  unique_key text,
  serial_key text,
  cancel_reason text,
  last_error text,
  progress jsonb,
  headers jsonb,
  payload jsonb not null,
  constraint jobs_key primary key (id),
  -- One constraint, and short: a statement prepares it anew, which an enqueue or a claim feels.
  constraint jobs_leased_whole_and_waiting_without_date check (
    (lease_token is null) = (leased_by is null)
    and (waits_for is null) = isfinite(claimable_at))
) with (
  autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.05,
  autovacuum_vacuum_cost_delay = 0, toast.autovacuum_vacuum_threshold = 1000,
  toast.autovacuum_vacuum_scale_factor = 0.05, toast.autovacuum_vacuum_cost_delay = 0);

-- Without the id: for a table that looks empty the planner would use this one to find it, and
-- keep that plan when there are a million.
create index if not exists jobs_claim on taskboard.jobs (lane_id, claimable_at, place);

create index if not exists jobs_turn
  on taskboard.jobs (serial_key, serial_no) where waits_for is not null;

-- For people: few jobs are held, and the rest does not touch it.
create index if not exists jobs_held on taskboard.jobs (id) where held_step is not null;

create table if not exists taskboard.unique_keys (
  kind text not null,
  key text not null,
  job_id uuid not null,
  live boolean not null,
  held_until timestamptz,
  constraint unique_keys_key primary key (kind, key)
) with (
  autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.05,
  autovacuum_vacuum_cost_delay = 0);

create table if not exists taskboard.serial_keys (
  key text not null,
  turn_of uuid not null,
  turn_no bigint not null,
  last_no bigint not null,
  constraint serial_keys_key primary key (key)
) with (
  autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.05,
  autovacuum_vacuum_cost_delay = 0);

-- A domain and not a constraint of the table: that is prepared anew by every statement that writes
-- a row, which a completion feels.
do $$
begin
  if to_regtype('taskboard.final_state') is null then
    create domain taskboard.final_state as text
      constraint final_state_known check (value in ('completed', 'failed', 'cancelled'));
  end if;
end
$$;

create table if not exists taskboard.history (
  id uuid not null,
  finished_at timestamptz not null,
  attempt integer not null,
  priority integer not null,
  failures integer not null,
  lost_leases integer not null,
  max_attempts integer,
  max_lost_leases integer,
  lease_token uuid,
  run_at timestamptz not null,
  created_at timestamptz not null,
  claimed_at timestamptz,
  lease interval,
  timeout interval,
  unique_until_claim boolean,
  state taskboard.final_state not null,
  queue text not null,
  kind text not null,
  on_unknown text not null,
  finished_by text,
  unique_key text,
  serial_key text,
  error text,
  headers jsonb,
  payload jsonb,
  result jsonb,
  constraint history_key primary key (id, finished_at)
) partition by range (finished_at);

-- Tiny, because rows come in the order of their date: for rates and pages of the newest.
create index if not exists history_finished
  on taskboard.history using brin (finished_at) with (pages_per_range = 16);

-- Jobs of queues that keep nothing: only these, so that others do not pay for it.
create index if not exists history_stubs on taskboard.history (finished_at) where payload is null;

-- For people: what ended badly, the newest first. What is completed does not touch it.
create index if not exists history_failed on taskboard.history (state, id)
  where state <> 'completed';

-- Who had a key: a filter of some bytes a job instead of an index of all keys, which would cost
-- each completion a write somewhere in its midst.
create index if not exists history_with_key on taskboard.history using brin (
    unique_key text_bloom_ops (n_distinct_per_range = 1000),
    serial_key text_bloom_ops (n_distinct_per_range = 1000))
  with (pages_per_range = 32, autosummarize = on);

create table if not exists taskboard.history_default
  partition of taskboard.history default;

create table if not exists taskboard.effects (
  job_id uuid not null,
  step text not null,
  lease_token uuid not null,
  attempt integer not null,
  idempotency_key text not null,
  begun_at timestamptz not null,
  ended_at timestamptz,
  happened boolean,
  result jsonb,
  constraint effects_key primary key (job_id, step, lease_token),
  constraint effects_ended_whole check ((ended_at is null) = (happened is null))
) with (
  autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0.05,
  autovacuum_vacuum_cost_delay = 0);

create table if not exists taskboard.schedules (
  name text not null,
  cron text not null,
  time_zone text not null,
  kind text not null,
  payload jsonb not null,
  queue text not null,
  priority smallint not null,
  misfire text not null,
  next_at timestamptz,
  last_at timestamptz,
  last_job_id uuid,
  paused_at timestamptz,
  created_at timestamptz not null,
  constraint schedules_key primary key (name),
  constraint schedules_priority_bounded check (priority between 0 and 9),
  constraint schedules_misfire_named check (misfire in ('skip', 'one', 'all'))
);

create table if not exists taskboard.incidents (
  id bigint not null generated always as identity,
  happened_at timestamptz not null,
  what text not null,
  job_id uuid,
  queue text,
  kind text,
  worker text,
  by_role text not null,
  detail text,
  constraint incidents_key primary key (id)
);

create index if not exists incidents_of_job on taskboard.incidents (job_id, id);

-- The rows that the functions return. Composite types and not "returns table", because a result
-- column may then bear the name of an argument.
do $$
begin
  if to_regtype('taskboard.enqueued') is null then
    create type taskboard.enqueued as (job_id uuid, created boolean);
  end if;
  if to_regtype('taskboard.claimed') is null then
    create type taskboard.claimed as (
      job_id uuid, lease_token uuid, lease_expires_at timestamptz, lease interval, timeout interval,
      queue text, kind text, payload jsonb, attempt integer, max_attempts integer, headers jsonb,
      failures integer, lost_leases integer, priority integer, run_at timestamptz,
      created_at timestamptz);
  end if;
  if to_regtype('taskboard.renewed') is null then
    create type taskboard.renewed as (
      job_id uuid, lease_expires_at timestamptz, cancel_requested boolean);
  end if;
  if to_regtype('taskboard.renewed_many') is null then
    create type taskboard.renewed_many as (
      job_id uuid, lease_expires_at timestamptz, cancel_requested boolean, outcome text);
  end if;
  if to_regtype('taskboard.completed') is null then
    create type taskboard.completed as (job_id uuid, finished_at timestamptz);
  end if;
  if to_regtype('taskboard.given_back') is null then
    create type taskboard.given_back as (job_id uuid, state text, claimable_at timestamptz);
  end if;
  if to_regtype('taskboard.leased') is null then
    create type taskboard.leased as (job_id uuid, lease_expires_at timestamptz);
  end if;
  if to_regtype('taskboard.effect_begun') is null then
    create type taskboard.effect_begun as (
      job_id uuid, step text, idempotency_key text, state text, result jsonb);
  end if;
  if to_regtype('taskboard.effect_ended') is null then
    create type taskboard.effect_ended as (job_id uuid, step text, state text);
  end if;
  if to_regtype('taskboard.job_state') is null then
    create type taskboard.job_state as (job_id uuid, state text);
  end if;
  if to_regtype('taskboard.queue_state') is null then
    create type taskboard.queue_state as (queue text, paused_at timestamptz);
  end if;
  if to_regtype('taskboard.job_result') is null then
    create type taskboard.job_result as (job_id uuid, state text, result jsonb, error text);
  end if;
  if to_regtype('taskboard.due_schedule') is null then
    create type taskboard.due_schedule as (
      name text, cron text, time_zone text, misfire text, due_at timestamptz, now timestamptz);
  end if;
  if to_regtype('taskboard.maintained') is null then
    create type taskboard.maintained as (step text, touched bigint);
  end if;
end
$$;

insert into taskboard.migrations (name) values ('0001_tables') on conflict do nothing;
