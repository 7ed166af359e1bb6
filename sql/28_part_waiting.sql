create or replace function taskboard.part_waiting(queue text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_lane taskboard.lanes;
  v_waits_in integer;
  v_now timestamptz;
begin
  for v_lane in
    select l.*
    from taskboard.lanes as l
    where l.queue = part_waiting.queue and l.returns_to = l.id and l.waits_in is null
    for update skip locked
  loop
    v_waits_in := nextval('taskboard.lane_ids');
    insert into taskboard.lanes (id, queue, kind, priority, "returning", returns_to, keeps, lease)
    values (
      v_waits_in, v_lane.queue, v_lane.kind, v_lane.priority, true, v_lane.id, v_lane.keeps,
      v_lane.lease);
    update taskboard.lanes as l set waits_in = v_waits_in where l.id = v_lane.id;
    -- What waits already. The transaction id before the clock, and no date from before it: for
    -- the floors (26_floor.sql) a job that moves is one that is written.
    v_now := case when pg_current_xact_id() is not null then clock_timestamp() end;
    update taskboard.jobs as j
    set lane_id = v_waits_in
    where j.ctid = any (array(
      select p.ctid
      from taskboard.jobs as p
      where p.lane_id = v_lane.id and p.claimable_at > v_now and p.claimable_at < 'infinity'
        and p.lease_token is null
      for update skip locked));
  end loop;
end
$$;

comment on function taskboard.part_waiting(text) is
$$Let jobs that wait for a retry stand apart from those that run (internal).
In a queue with max_running, so that who counts what runs does not read what waits. Another
returning lane for each: fail and release put jobs there, claim leases from both.
The caller holds the row of the queue. Never waits for a lane or a job; what is locked just now
stays where it is, which costs time and nothing else.$$;
