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
comment on column taskboard.jobs.place is
$$Order among jobs that were enqueued in one call.$$;
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
comment on column taskboard.lanes.queue is $$Which workers run it; needs no row in queues.$$;
comment on column taskboard.lanes.kind is $$Which handler runs it.$$;
comment on column taskboard.lanes.priority is $$0 to 9; lower runs first.$$;
comment on column taskboard.lanes."returning" is $$Whether it holds jobs claimed before.$$;
comment on column taskboard.lanes.returns_to is $$The lane that its jobs move to when claimed.$$;
comment on column taskboard.lanes.waits_in is
$$Under max_running: the lane for its jobs that were given back, so that it holds those that run.$$;
comment on column taskboard.lanes.lease is
$$The queue's lease, from queues.lease.$$;
comment on column taskboard.lanes.keeps is
$$A copy of the queue's keep_completed, for the statement that completes.$$;

comment on table taskboard.history is
$$Finished jobs, one partition per day (UTC); retention drops whole partitions.$$;
comment on column taskboard.history.finished_at is $$When it ended; picks the partition.$$;
comment on column taskboard.history.state is $$completed, failed or cancelled.$$;
comment on column taskboard.history.lease_token is
$$The token that finished the job; null when an operator or maintenance did.$$;
comment on column taskboard.history.finished_by is $$The worker or role that finished it.$$;
comment on column taskboard.history.error is $$Why it failed or was cancelled.$$;
comment on column taskboard.history.result is $$What the handler returned.$$;

comment on table taskboard.effects is
$$What attempts began outside the database: one row per job, step and lease token.$$;
comment on column taskboard.effects.job_id is $$The job.$$;
comment on column taskboard.effects.step is
$$Which effect of the job: lower case letters, digits and ./-_, at most 100.$$;
comment on column taskboard.effects.idempotency_key is $$Job id and step; never changes.$$;
comment on column taskboard.effects.begun_at is $$When the gate was passed the first time.$$;
comment on column taskboard.effects.ended_at is $$When somebody testified; null: open.$$;
comment on column taskboard.effects.happened is $$The testimony: took place, or refused before.$$;
comment on column taskboard.effects.result is $$What the other side answered.$$;

comment on table taskboard.unique_keys is
$$Who holds a unique key: a live job, or until held_until also an ended one.$$;
comment on column taskboard.unique_keys.live is $$Whether its job still needs the key.$$;
comment on column taskboard.unique_keys.held_until is
$$When unique_for ends; null: the key goes with its job.$$;
comment on table taskboard.serial_keys is
$$One row per serial key with live jobs; its row lock orders everything about the key.$$;
comment on column taskboard.serial_keys.turn_of is $$The job that may run.$$;
comment on column taskboard.serial_keys.turn_no is $$Its number: the next one comes after it.$$;
comment on column taskboard.serial_keys.last_no is $$The last number drawn.$$;

comment on table taskboard.incidents is
$$Append-only evidence of what went wrong and of what people did; capped per minute.$$;
comment on column taskboard.incidents.happened_at is $$When it was written down.$$;
comment on column taskboard.incidents.what is
$$write_refused, lease_lapsed, job_exhausted, job_held, evidence_arrived, job_resolved,
cancel_requested, job_cancelled, job_retried, worker_evicted, queue_paused, queue_resumed,
queue_limited.$$;
comment on column taskboard.incidents.worker is $$The worker it is about; null: none.$$;
comment on column taskboard.incidents.by_role is $$The role that made the call.$$;
comment on column taskboard.incidents.detail is
$$For people: reason, step or numbers, at most 1,000 characters.$$;

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
comment on column taskboard.schedules.name is $$The schedule.$$;
comment on column taskboard.schedules.cron is $$Five fields; the runner reads them.$$;
comment on column taskboard.schedules.time_zone is $$Whose clock the cron rule means.$$;
comment on column taskboard.schedules.next_at is
$$The next occurrence; null until a runner has worked it out.$$;
comment on column taskboard.schedules.misfire is
$$What to do about occurrences nobody was there for: skip, one, all.$$;
comment on column taskboard.schedules.last_at is $$The last occurrence that was enqueued.$$;
comment on column taskboard.schedules.last_job_id is $$The job of that occurrence.$$;
comment on table taskboard.queue_starts is $$Recent claims from queues with a rate.$$;
comment on column taskboard.queue_starts.started_at is $$When they were counted, after the claim.$$;
comment on column taskboard.queue_starts.jobs is $$How many jobs were claimed then.$$;
comment on table taskboard.queue_rights is
$$Roles that may use only named queues; roles without a row here may use all.$$;
comment on column taskboard.queue_rights.role is $$By its oid: a renamed role stays limited.$$;
comment on table taskboard.settings is $$One row: defaults and limits of this database.$$;
comment on column taskboard.settings.backoff is
$$Wait before the first retry; doubles with each failure, +- 25 %.$$;
comment on column taskboard.settings.backoff_max is $$Longest such wait, before the +- 25 %.$$;
comment on column taskboard.settings.payload_bytes is
$$Most bytes of one payload, headers or result.$$;
comment on column taskboard.settings.error_bytes is $$Longer errors are cut to this.$$;
comment on column taskboard.settings.claim_jobs is $$Most jobs in one claim or batch call.$$;
comment on column taskboard.settings.bulk_jobs is $$Most jobs in one enqueue_many.$$;
comment on column taskboard.settings.lanes_most is
$$Most lanes, two for each queue, kind and priority: a claim looks at them all.$$;
comment on column taskboard.settings.lease_least is
$$Shortest lease that may be asked for, and shortest timeout of a job.$$;
comment on column taskboard.settings.lease_most is $$Longest lease that may be asked for.$$;
comment on column taskboard.settings.delay_most is
$$Furthest run_at from now; longest delay, retry_in, unique_for, key_valid_for and timeout.$$;
comment on column taskboard.settings.history is $$How long finished jobs are kept.$$;
comment on column taskboard.settings.incidents_per_minute is
$$Most incidents written down in a minute; 0: none.$$;
comment on column taskboard.settings.notify is $$Whether enqueue may notify sleeping workers.$$;
comment on column taskboard.settings.shard is $$This database's number, part of each job id.$$;
comment on column taskboard.settings.queue_rights is
$$Whether any role is limited to named queues; kept by allow_queue and disallow_queue.$$;
comment on column taskboard.settings.shard_id is
$$The shard as the last four digits of a job id.$$;
comment on column taskboard.settings.queue_limits is
$$Whether some queue is paused or has a limit.$$;
comment on column taskboard.settings.paused_at is $$Since when all claims are paused.$$;
comment on table taskboard.migrations is
$$What was installed, written by every way of installing; functions has the loaded checksum.$$;
comment on column taskboard.migrations.checksum is
$$Of the files, written by taskboard migrate; null: loaded by hand with psql.$$;
comment on column taskboard.migrations.applied_at is $$When it was applied or loaded last.$$;

-- Of what functions return, the words that no table has.
comment on column taskboard.enqueued.created is
$$Whether this call made the job; else it held the unique key already.$$;
comment on column taskboard.leased.lease_expires_at is
$$The lease's deadline, by the database's clock.$$;
comment on column taskboard.renewed.cancel_requested is
$$Somebody asked to stop: end with fail or release.$$;
comment on column taskboard.maintained.step is $$What was looked at.$$;
comment on column taskboard.maintained.touched is $$So many rows or partitions were changed.$$;
comment on column taskboard.job_state.state is $$What the job is now.$$;
comment on column taskboard.job_result.state is $$completed, failed or cancelled.$$;
comment on column taskboard.job_result.result is $$What its handler returned.$$;
comment on column taskboard.job_result.error is $$Why it failed or was cancelled.$$;
comment on column taskboard.queue_state.paused_at is $$Since when; null: it is not paused.$$;
