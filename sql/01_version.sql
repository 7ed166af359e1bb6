set local search_path = pg_catalog, pg_temp;

-- The one place of the version: the Python package is built with it, the runner compares it.
create or replace function taskboard.version()
returns text
language sql
immutable
security definer
set search_path = pg_catalog, pg_temp
as $$ select '0.1.0'::text $$;

comment on function taskboard.version() is
$$Return the version of the loaded functions, as major.minor.patch.
A runner refuses to start against another major.minor. Role: everybody who may use Taskboard.$$;

-- Whoever loads the functions by hand leaves no checksum behind, so that `taskboard migrate`
-- loads its own and says so.
insert into taskboard.migrations as m (name) values ('functions')
on conflict (name) do update set checksum = null, applied_at = clock_timestamp();
