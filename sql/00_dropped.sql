set local search_path = pg_catalog, pg_temp;

-- Functions of earlier versions that are no more, or took or gave something else: dropped in the
-- transaction that makes what comes instead, so that no call ever finds neither. One line each:
-- the signature, and what it returned.
do $$
declare
  v_function record;
begin
  for v_function in
    select p.oid::regprocedure as signature
    from (values
      ('advance_schedule(text, timestamptz, timestamptz, boolean)', 'uuid'),
      ('advance_schedule(text, timestamptz, timestamptz, boolean, text)', 'uuid'),
      ('check_claim(text[], text[], integer, interval, text)', 'record'),
      ('evict(text)', 'taskboard.job_state'),
      ('floors_due(text, timestamptz)', 'boolean'),
      ('free_unique_key(text, text, uuid)', 'void'),
      ('give_up_key(text, text, uuid)', 'text'),
      ('instant(bigint)', 'timestamptz'),
      ('microseconds(timestamptz)', 'bigint'),
      ('new_job_id(timestamptz, text)', 'uuid'),
      ('pick_jobs(text[], text[], integer, bigint, boolean, tid[])', 'tid[]'),
      ('note_takeovers(tid[])', 'void'),
      ('pause(text)', 'taskboard.queue_state'),
      ('plan_claim(text[], integer)', 'record'),
      ('plan_scan(text[], text[], text[], bigint)', 'text[]'),
      ('resolve(uuid, text, boolean)', 'taskboard.job_state'),
      ('resume(text)', 'taskboard.queue_state'),
      ('retry(uuid)', 'taskboard.job_state'),
      ('retry_failed(text, text, integer)', 'taskboard.job_state')
    ) as earlier (signature, result)
    join pg_proc as p on p.oid = to_regprocedure('taskboard.' || earlier.signature)
      and p.prorettype = to_regtype(earlier.result)
  loop
    execute format('drop function %s', v_function.signature);
  end loop;
end
$$;
