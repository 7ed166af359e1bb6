set local search_path = pg_catalog, pg_temp;

-- The meaning of the data, beside the functions that write it. No tables are made here.
comment on schema taskboard is
$$A job queue. Tables are private; call the functions and read the views.$$;

comment on table taskboard.jobs is
$$Live jobs only. A job leaves for history in the statement that finishes it.$$;
comment on column taskboard.jobs.id is
$$Time-ordered random uuid; its last two bytes are the shard. Never issued twice.$$;
comment on column taskboard.jobs.lane_id is
$$Queue, kind and priority in one narrow number; a claimed job moves to the returning lane.$$;
comment on column taskboard.jobs.attempt is
$$How often the job was claimed. Only tells attempts apart; decides nothing.$$;
comment on column taskboard.jobs.claimable_at is
$$From when a worker may claim: the due time; while leased the deadline; infinity while it waits.$$;
comment on column taskboard.jobs.run_at is $$When the job was asked to run, as asked.$$;
comment on column taskboard.jobs.created_at is $$When it was enqueued.$$;
comment on column taskboard.jobs.claimed_at is $$When the current lease was claimed.$$;
comment on column taskboard.jobs.lease_token is
$$The secret of the current lease: only who presents it may write. Null when nobody has a lease.$$;
comment on column taskboard.jobs.last_token is
$$The token that gave the job back last, by fail or release; for lease_status.$$;
comment on column taskboard.jobs.lease_granted is $$How long the current lease was granted.$$;
comment on column taskboard.jobs.lease is $$Lease asked for at enqueue; null: the queue's.$$;
comment on column taskboard.jobs.timeout is
$$Longest run of one attempt; then renewal is refused. Null: settings.timeout.$$;
comment on column taskboard.jobs.failures is $$Attempts that said fail; against max_attempts.$$;
comment on column taskboard.jobs.lost_leases is
$$Attempts that said nothing; against max_lost_leases.$$;
comment on column taskboard.jobs.max_attempts is
$$So many failures end it as failed; null: settings.max_attempts.$$;
comment on column taskboard.jobs.max_lost_leases is
$$So many lost leases do; null: settings.max_lost_leases.$$;
comment on column taskboard.jobs.serial_no is $$Order within the serial key.$$;
comment on column taskboard.jobs.cancel_requested_at is $$When a running job was asked to stop.$$;
comment on column taskboard.jobs.on_unknown is
$$What to do about an effect with an unknown outcome: retry, or hold for a person.$$;
comment on column taskboard.jobs.waits_for is
$$Why it has no date: turn (blocked behind its serial key) or person (held).$$;
comment on column taskboard.jobs.held_step is $$The effect that a person is asked about.$$;
comment on column taskboard.jobs.leased_by is $$Name of the worker that has the lease.$$;
comment on column taskboard.jobs.lapsed_by is
$$From whom the present claim took over a lapsed lease; null if it did not.$$;
comment on column taskboard.jobs.unique_key is $$Key that one live job of a kind may hold.$$;
comment on column taskboard.jobs.serial_key is $$Jobs with one key run one at a time.$$;
comment on column taskboard.jobs.cancel_reason is $$Why it was asked to stop.$$;
comment on column taskboard.jobs.last_error is $$Error of the last failure, at most 8 kB.$$;
comment on column taskboard.jobs.unique_until_claim is
$$True when a claim frees the unique key.$$;
comment on column taskboard.jobs.progress is $$What the worker reported with a renewal.$$;
comment on column taskboard.jobs.headers is $$The producer's notes to the handler (tracing …).$$;
comment on column taskboard.jobs.payload is $$What the handler works on, at most 1 MB.$$;

comment on table taskboard.lanes is
$$One ordered stream of jobs per queue, kind and priority, and one for those that return.
Not unique: two first registrations at once make two, and claim reads both.$$;
comment on column taskboard.lanes."returning" is $$Whether it holds jobs claimed before.$$;
comment on column taskboard.lanes.returns_to is $$The lane that its jobs move to when claimed.$$;

comment on table taskboard.history is
$$Finished jobs, one partition per day (UTC); retention drops whole partitions.$$;
comment on column taskboard.history.state is $$completed, failed or cancelled.$$;
comment on column taskboard.history.lease_token is
$$The token that finished the job; null when an operator or maintenance did.$$;
comment on column taskboard.history.finished_by is $$The worker or role that finished it.$$;
comment on column taskboard.history.error is $$Why it failed or was cancelled.$$;
comment on column taskboard.history.result is $$What the handler returned.$$;

comment on table taskboard.effects is
$$What attempts began outside the database: one row per job, step and lease token.$$;
comment on column taskboard.effects.idempotency_key is $$Job id and step; never changes.$$;
comment on column taskboard.effects.begun_at is $$When the gate was passed the first time.$$;
comment on column taskboard.effects.ended_at is $$When somebody testified; null: open.$$;
comment on column taskboard.effects.happened is $$The testimony: took place, or refused before.$$;
comment on column taskboard.effects.result is $$What the other side answered.$$;

comment on table taskboard.unique_keys is
$$Who holds a unique key: a live job, or until held_until also an ended one.$$;
comment on table taskboard.serial_keys is
$$One row per serial key with live jobs; its row lock orders everything about the key.$$;
comment on column taskboard.serial_keys.turn_of is $$The job that may run.$$;
comment on column taskboard.serial_keys.turn_no is $$Its number: the next one comes after it.$$;
comment on column taskboard.serial_keys.last_no is $$The last number drawn.$$;

comment on table taskboard.incidents is
$$Append-only evidence of what went wrong and of what people did; capped per minute.$$;
comment on column taskboard.incidents.what is
$$write_refused, lease_lapsed, job_exhausted, job_held, evidence_arrived, job_resolved,
cancel_requested, job_cancelled, job_retried, worker_evicted, queue_paused, queue_resumed.$$;
comment on column taskboard.incidents.by_role is $$The role that made the call.$$;

comment on table taskboard.queues is $$Queues with options of their own; others need no row.$$;
comment on column taskboard.queues.paused_at is $$Since when nobody may claim from it.$$;
comment on column taskboard.queues.lease is $$Lease of its jobs; null: settings.lease.$$;
comment on column taskboard.queues.max_running is $$Most unexpired leases at once.$$;
comment on column taskboard.queues.max_starts is $$Most claims in any interval of starts_per.$$;
comment on column taskboard.queues.starts_per is $$Length of that interval.$$;
comment on column taskboard.queues.keep_completed is
$$Whether completed jobs stay in history; else only id and token, for an hour.$$;
comment on column taskboard.queues.keep_failed is
$$How long failed jobs stay when the rest has gone; null: no longer.$$;
comment on table taskboard.schedules is
$$What to enqueue at the occurrences of a cron rule; runners advance it by compare and set.$$;
comment on column taskboard.schedules.next_at is
$$The next occurrence; null until a runner has worked it out.$$;
comment on column taskboard.schedules.misfire is
$$What to do about occurrences nobody was there for: skip, one, all.$$;
comment on table taskboard.queue_starts is $$Recent claims from queues with a rate.$$;
comment on table taskboard.queue_rights is
$$Roles that may use only named queues; roles without a row here may use all.$$;
comment on table taskboard.settings is $$One row: defaults and limits of this database.$$;
comment on column taskboard.settings.claim_jobs is $$Most jobs in one claim or batch call.$$;
comment on column taskboard.settings.bulk_jobs is $$Most jobs in one enqueue_many.$$;
comment on column taskboard.settings.history is $$How long finished jobs are kept.$$;
comment on column taskboard.settings.notify is $$Whether enqueue may notify sleeping workers.$$;
comment on column taskboard.settings.shard is $$This database's number, part of each job id.$$;
comment on column taskboard.settings.paused_at is $$Since when all claims are paused.$$;
comment on table taskboard.migrations is
$$What was installed, written by every way of installing; functions has the loaded checksum.$$;
