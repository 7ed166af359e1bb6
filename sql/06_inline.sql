-- Expressions that the planner expands in place. Their bodies are parsed when they are created, so
-- no name is looked up later and there is no search_path to pin (a pinned one prevents expansion).

create or replace function taskboard.exact(span interval)
returns interval
language sql
immutable
return make_interval(secs => extract(epoch from span)::double precision);

comment on function taskboard.exact(interval) is
$$Turn days and months into seconds (internal).
'1 day' is 23 to 25 hours by the caller's time zone; what we add to a clock must not be.$$;

-- A job id: 48 bits of milliseconds, version 7, 58 random bits, 16 bits of shard. The milliseconds
-- have eleven hexadecimal digits until the year 2527.
create or replace function taskboard.job_id_head(at timestamptz)
returns text
language sql
stable
return concat('0', to_hex((date_part('epoch', at) * 1000)::bigint));

comment on function taskboard.job_id_head(timestamptz) is
$$Return the first twelve digits of a job id, its time (internal).$$;

-- The seed is random, and a batch counts on from it: strong random numbers cost more than the rest
-- of an insert.
create or replace function taskboard.new_job_id(head text, seed uuid, n bigint, shard text)
returns uuid
language sql
stable
return concat(
  head,
  to_hex(
    uuid_hash_extended(seed, n) & x'0fff3fffffffffff'::bigint | x'7000800000000000'::bigint),
  shard)::uuid;

comment on function taskboard.new_job_id(text, uuid, bigint, text) is
$$Make a time-ordered random job id that carries its shard (internal).
head: job_id_head. seed: gen_random_uuid; n: a number for each job of a batch. shard:
settings.shard_id. Random and not a sequence: no failover or restore may issue an id again.$$;

-- A lock that was got is let go at once; what is read is whether we got it.
create or replace function taskboard.somebody_sleeps(queue text)
returns boolean
language sql
volatile
return case when pg_try_advisory_lock(1952539506, 0)
    then not pg_advisory_unlock(1952539506, 0) else true end
  or case when pg_try_advisory_lock(1952539506, hashtext(queue))
    then not pg_advisory_unlock(1952539506, hashtext(queue)) else true end;

comment on function taskboard.somebody_sleeps(text) is
$$Tell whether a worker may be asleep on a queue, or on all queues (internal).
A sleeper holds a shared advisory lock for each queue it waits for, or one for all.$$;

-- A document that comes compressed from a table is measured as it will be read.
create or replace function taskboard.document_bytes(document jsonb)
returns integer
language sql
stable
return case when pg_column_compression(document) is null
  then pg_column_size(document) else octet_length(document::text) end;

comment on function taskboard.document_bytes(jsonb) is
$$Measure a document, in bytes (internal).$$;
