create or replace function taskboard.may_use(queue text)
returns boolean
language sql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
  -- The login and the role it has set must both be allowed: whoever is limited cannot shake that
  -- off by becoming a role that is not.
  select bool_and(
    who.is_super
    or not exists (
      select from taskboard.queue_rights as r
      join pg_roles as limited on limited.oid = r.role
      where pg_has_role(who.name, limited.oid, 'member'))
    or exists (
      select from taskboard.queue_rights as r
      join pg_roles as limited on limited.oid = r.role
      where pg_has_role(who.name, limited.oid, 'member') and r.queue = may_use.queue))
  from (
    select p.rolname as name, p.rolsuper as is_super
    from pg_roles as p
    where p.rolname in (session_user, taskboard.caller())) as who
$$;

comment on function taskboard.may_use(text) is
$$Tell whether the calling role may use a queue.
A role that has queues in queue_rights, itself or by membership, may use only those.
Role: everybody who may use Taskboard; queue_stats asks it in the caller's name.$$;

create or replace function taskboard.may_touch(job_id uuid, lease_token uuid)
returns boolean
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if may_touch.job_id is null or may_touch.lease_token is null then
    raise exception using errcode = '22004',
      message = 'job_id and lease_token must not be null',
      hint = 'Pass both as claim returned them.';
  end if;
  return taskboard.may_see(may_touch.job_id);
end
$$;

comment on function taskboard.may_touch(uuid, uuid) is
$$Tell whether the calling role may act on a job; refuse nulls (22004) (internal).
A job of a queue that the role may not use looks like one that does not exist.$$;

create or replace function taskboard.may_see(job_id uuid)
returns boolean
language plpgsql
stable
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- Apart, because a statement that names history locks all its partitions before it begins.
  if not (select s.queue_rights from taskboard.settings as s) then
    return true;
  end if;
  return exists (
    select from taskboard.jobs as j
    join taskboard.lanes as l on l.id = j.lane_id + 0
    where j.id = may_see.job_id and taskboard.may_use(l.queue))
  or exists (
    select from taskboard.history as h
    where h.id = may_see.job_id and taskboard.may_use(h.queue));
end
$$;

comment on function taskboard.may_see(uuid) is
$$Tell whether a job lies in a queue that the calling role may use (internal).$$;

create or replace function taskboard.check_holder(job_id uuid)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  if exists (
    select from taskboard.jobs as j
    join taskboard.lanes as l on l.id = j.lane_id + 0
    where j.id = check_holder.job_id and not taskboard.may_use(l.queue))
  or exists (
    select from taskboard.history as h
    where h.id = check_holder.job_id and not taskboard.may_use(h.queue))
  then
    raise exception using errcode = '42501',
      message = 'the unique key is held in a queue that this role may not use',
      hint = 'The keys of a kind are one namespace: begin yours with the name of your queue.';
  end if;
end
$$;

comment on function taskboard.check_holder(uuid) is
$$Refuse to tell the holder of a unique key to who may not see it (internal).
A holder that has been pruned is told: its id opens nothing. Errors: 42501.$$;

create or replace function taskboard.own_tokens(job_ids uuid[], lease_tokens uuid[])
returns uuid[]
language sql
volatile
security definer
set search_path = pg_catalog, pg_temp
as $$
  select array(
    select case when taskboard.may_see(w.id) then w.token else gen_random_uuid() end
    from unnest(own_tokens.job_ids, own_tokens.lease_tokens) with ordinality as w (id, token, n)
    order by w.n)
$$;

comment on function taskboard.own_tokens(uuid[], uuid[]) is
$$Replace tokens of jobs in queues that the caller may not use (internal).
The new ones are nobody's.$$;

create or replace function taskboard.note_rights()
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
begin
  -- Lock, then look, in two statements, and written even when nothing changes: as in note_queues.
  perform from taskboard.settings as s where s.one_row for update;
  update taskboard.settings as s
  set queue_rights = exists (select from taskboard.queue_rights)
  where s.one_row;
end
$$;

comment on function taskboard.note_rights() is
$$Note in the settings whether some role is limited to queues (internal).
Called after each change of a right, so that nobody else need look at the rights.$$;

create or replace function taskboard.allow_queue(role_name text, queue text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
begin
  perform taskboard.check_name('queue', allow_queue.queue);
  if allow_queue.role_name is null or to_regrole(quote_ident(allow_queue.role_name)) is null then
    raise exception using errcode = '22023', message = 'no such role',
      hint = 'Create the role, then allow it a queue.';
  end if;
  -- By its oid: a role that is renamed stays limited.
  insert into taskboard.queue_rights (role, queue)
  values (to_regrole(quote_ident(allow_queue.role_name)), allow_queue.queue)
  on conflict do nothing;
  perform taskboard.note_rights();
end
$$;

comment on function taskboard.allow_queue(text, text) is
$$Limit a role to named queues, and allow it this one.
role_name: a role or a login. It may use no other queue that is not allowed.
Holds for logins that are members of the role, and after set role both for the login and the role.
Superusers are not limited. Errors: 22004, 22023. For the owner alone.$$;

create or replace function taskboard.disallow_queue(role_name text, queue text)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set lock_timeout = '5s'
as $$
begin
  delete from taskboard.queue_rights as r
  where r.role = to_regrole(quote_ident(disallow_queue.role_name))
    and r.queue = disallow_queue.queue;
  perform taskboard.note_rights();
end
$$;

comment on function taskboard.disallow_queue(text, text) is
$$Take an allowed queue from a role.
role_name: one without any is not limited any more. For the owner alone.$$;
