set local search_path = pg_catalog, pg_temp;

-- The self-check of an installation. It raises, and so undoes the load, when a rule is broken.
do $$
declare
  v_broken text;
begin
  select string_agg(p.proname, ', ') into v_broken
  from (
    select p.proname
    from pg_proc as p
    where p.pronamespace = 'taskboard'::regnamespace
    group by p.proname
    having count(*) > 1) as p;
  if v_broken is not null then
    raise exception 'these functions have more than one signature: %', v_broken
      using hint = 'Drop the old signature in a migration: old calls are ambiguous.';
  end if;

  select string_agg(p.proname, ', ') into v_broken
  from pg_proc as p
  where p.pronamespace = 'taskboard'::regnamespace
    and not coalesce(p.proconfig, '{}') @> array['search_path=pg_catalog, pg_temp']
    -- A body parsed at definition has no names left to look up.
    and (p.prosqlbody is null or p.prosecdef);
  if v_broken is not null then
    raise exception 'these functions do not pin their search_path: %', v_broken;
  end if;

  select string_agg(o.name, ', ') into v_broken
  from (
    select p.proname as name, coalesce(p.proacl, acldefault('f', p.proowner)) as acl
    from pg_proc as p
    where p.pronamespace = 'taskboard'::regnamespace
    union all
    select c.relname, c.relacl
    from pg_class as c
    where c.relnamespace = 'taskboard'::regnamespace
    union all
    select t.typname, coalesce(t.typacl, acldefault('T', t.typowner))
    from pg_type as t
    where t.typnamespace = 'taskboard'::regnamespace and t.typcategory <> 'A') as o
  cross join lateral aclexplode(o.acl) as a
  where a.grantee = 0;
  if v_broken is not null then
    raise exception 'these objects are open to everybody: %', v_broken;
  end if;

  select string_agg(p.proname, ', ') into v_broken
  from pg_proc as p
  where p.pronamespace = 'taskboard'::regnamespace
    and obj_description(p.oid, 'pg_proc') is null;
  if v_broken is not null then
    raise exception 'these functions have no comment: %', v_broken;
  end if;
end
$$;
