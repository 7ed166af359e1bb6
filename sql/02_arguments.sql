create or replace function taskboard.check_name(argument text, value text)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if check_name.value is null then
    raise exception using errcode = '22004',
      message = format('%s must not be null', check_name.argument),
      hint = format('Give %s a text of 1 to 200 characters.', check_name.argument);
  end if;
  if check_name.value = '' or char_length(check_name.value) > 200
    or check_name.value ~ '[[:cntrl:]]'
  then
    raise exception using errcode = '22023',
      message = format('%s is empty, too long, or has control characters', check_name.argument),
      hint = format('Give %s a text of 1 to 200 printable characters.', check_name.argument);
  end if;
end
$$;

comment on function taskboard.check_name(text, text) is
$$Refuse a name that is null, empty, too long or unprintable (internal).
Errors: 22004 null, 22023 the others.$$;

create or replace function taskboard.check_span(
  argument text, value interval, lowest interval, highest interval)
returns interval
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  -- Compared before exact(): an infinite interval has no epoch on PostgreSQL 17 and later.
  if check_span.value < check_span.lowest or check_span.value > check_span.highest then
    raise exception using errcode = '22023',
      message = format('%s is out of bounds', check_span.argument),
      hint = format('Give %s between %s and %s.',
        check_span.argument, check_span.lowest, check_span.highest);
  end if;
  return taskboard.exact(check_span.value);
end
$$;

comment on function taskboard.check_span(text, interval, interval, interval) is
$$Refuse a duration outside its bounds (22023), else return it in seconds (internal).
Null passes: it stands for a default.$$;

create or replace function taskboard.check_document(argument text, value jsonb, most integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if taskboard.document_bytes(check_document.value) > check_document.most then
    raise exception using errcode = '22023',
      message = format('%s is larger than %s bytes', check_document.argument, check_document.most),
      hint = 'Store large data elsewhere and put a reference into the document.';
  end if;
end
$$;

comment on function taskboard.check_document(text, jsonb, integer) is
$$Refuse a document that is too large (22023) (internal). Null passes.$$;

create or replace function taskboard.check_pairs(job_ids uuid[], lease_tokens uuid[], most integer)
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if check_pairs.job_ids is null or check_pairs.lease_tokens is null then
    raise exception using errcode = '22004',
      message = 'job_ids and lease_tokens must not be null',
      hint = 'Give two arrays of equal length; empty arrays are fine.';
  end if;
  if cardinality(check_pairs.job_ids) <> cardinality(check_pairs.lease_tokens)
    or coalesce(array_ndims(check_pairs.job_ids), 1) <> 1
    or coalesce(array_ndims(check_pairs.lease_tokens), 1) <> 1
    or array_position(check_pairs.job_ids, null) is not null
    or array_position(check_pairs.lease_tokens, null) is not null
  then
    raise exception using errcode = '22023',
      message = 'job_ids and lease_tokens do not match, or hold nulls',
      hint = 'Give each job id its lease token at the same place.';
  end if;
  if cardinality(check_pairs.job_ids) > check_pairs.most then
    raise exception using errcode = '22023',
      message = format('more than %s jobs in one call', check_pairs.most),
      hint = 'Send smaller batches.';
  end if;
end
$$;

comment on function taskboard.check_pairs(uuid[], uuid[], integer) is
$$Refuse arrays of job ids and lease tokens that do not match (internal).
Errors: 22004, 22023.$$;

create or replace function taskboard.check_names(queues text[], kinds text[])
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  if coalesce(array_ndims(check_names.queues), 1) <> 1
    or coalesce(array_ndims(check_names.kinds), 1) <> 1
  then
    raise exception using errcode = '22023', message = 'queues or kinds is nested',
      hint = 'Name queues and kinds in a plain array, or pass null for all.';
  end if;
  if array_position(check_names.queues, null) is not null
    or array_position(check_names.kinds, null) is not null
  then
    raise exception using errcode = '22004', message = 'queues or kinds holds nulls',
      hint = 'Name queues and kinds, or pass null for all.';
  end if;
end
$$;

comment on function taskboard.check_names(text[], text[]) is
$$Refuse arrays of names that hold nulls or are nested (internal).
Errors: 22004 nulls, 22023 nested. Null passes.$$;

create or replace function taskboard.cut(value text, bytes integer)
returns text
language plpgsql
immutable
set search_path = pg_catalog, pg_temp
as $$
declare
  v_text text := left(cut.value, cut.bytes);
begin
  if octet_length(cut.value) <= cut.bytes then
    return cut.value;
  end if;
  while octet_length(v_text) > cut.bytes - 12 loop
    v_text := left(v_text, -greatest((octet_length(v_text) - cut.bytes + 12) / 4, 1));
  end loop;
  return v_text || ' … (cut)';
end
$$;

comment on function taskboard.cut(text, integer) is
$$Cut a text to so many bytes, with a mark (internal).$$;
