-- The hot path: what a gateway does to the database for each request, for many requests at once.
--
-- hot_batch is the one entry. It locks every row that the batch will change, in one order that everything else follows
-- too (jobs, balances, attempts, nodes; each by id; a balance's lock covers the holds of its account), and only then
-- judges and writes: each statement of a plpgsql function sees what was committed before it began, so nothing is judged
-- on a snapshot older than its lock. The caller decides about the transaction. Records carry the field names of
-- marketplace/jobs/hot.py.
--
-- A lease ends when somebody ends it, and anybody may once it has expired; until then its holder goes on.

create type hot_rates as (input bigint, cached_input bigint, output bigint);

create type hot_attempt as (
  attempt_id uuid, node_id uuid, offer_id uuid, price_id bigint, rates hot_rates, gateway_id text,
  lease_s double precision
);

create type hot_admit as (
  job_id uuid, organisation_id uuid, key_id uuid, credit_account_id bigint, request_id text, kind text,
  variant_id uuid, body text, prompt_tokens bigint, max_output_tokens bigint, ceiling hot_rates, hold_nano bigint,
  hold_margin_s double precision, gateway_id text, deadline_s double precision, attempt hot_attempt
);

create type hot_lease as (job_id uuid, attempt hot_attempt);

create type hot_checkpoint as (attempt_id uuid, epoch bigint, accepted_tokens bigint, lease_s double precision);

create type hot_receipt as (
  owner_organisation_id uuid, device_id text, simulated boolean,
  input_uncached_tokens bigint, input_cached_tokens bigint,
  output_visible_tokens bigint, output_reasoning_tokens bigint,
  input_uncached_nano bigint, input_cached_nano bigint, output_visible_nano bigint, output_reasoning_nano bigint,
  charge_nano bigint, fee_nano bigint, owner_nano bigint, loss_nano bigint, node_signature text
);

create type hot_close as (
  job_id uuid, attempt_id uuid, epoch bigint, job_state text, outcome text, end_code text, fault text,
  accepted_tokens bigint, busy_ms bigint, first_token boolean, endpoint text, error_code text, error_message text,
  result text, receipt hot_receipt
);

create type hot_refused as (request_id text, organisation_id uuid, endpoint text, outcome text, code text);


-- The most that an answer can cost, in nano-USD, rounded as a receipt is (up to the tie): see metering/pricing.py.
create function hot_worst_case(rates hot_rates, prompt_tokens bigint, max_output_tokens bigint)
returns numeric language sql immutable as $$
  select ceil(
    (prompt_tokens::numeric * greatest(rates.input, rates.cached_input) + max_output_tokens::numeric * rates.output)
    / 1000000 - 0.5)
$$;


create function hot_lock(admits hot_admit[], leases hot_lease[], checkpoints hot_checkpoint[], closes hot_close[])
returns void language plpgsql as $$
declare
  job_ids uuid[];
begin
  select array_agg(l.job_id) into job_ids
    from (select job_id from unnest(leases) union select job_id from unnest(closes)) l;
  if job_ids is not null then
    perform 1 from jobs j where j.id = any (job_ids) order by j.id for no key update;
  end if;
  if cardinality(admits) > 0 or cardinality(closes) > 0 then
    perform 1 from ledger_balances b
      where b.account_id in (
        select a.credit_account_id from unnest(admits) a
        union
        select h.account_id from ledger_holds h join unnest(closes) c on c.job_id = h.id
          where c.job_state in ('delivered', 'voided'))
      order by b.account_id for no key update;
  end if;
  if cardinality(checkpoints) > 0 or cardinality(closes) > 0 then
    perform 1 from attempts a
      where a.id in (select attempt_id from unnest(checkpoints) union select attempt_id from unnest(closes))
      order by a.id for no key update;
  end if;
end $$;


-- Answers [[ok, available_nano], ...] in the order of the records. Within an account the first come is the first
-- served: a record that does not fit is refused, and a smaller one behind it may still fit.
create function admit_batch(admits hot_admit[]) returns json language plpgsql as $$
declare
  at_now constant timestamptz := clock_timestamp();
  total constant int := cardinality(admits);
  written boolean[] := array_fill(false, array[total]);
  ok boolean[] := array_fill(false, array[total]);
  available bigint[] := array_fill(0::bigint, array[total]);
  account bigint;
  left_nano bigint;
  r record;
begin
  if exists (
    select from unnest(admits) a
    where a.hold_nano < hot_worst_case(
            case when (a.attempt).attempt_id is null then a.ceiling else (a.attempt).rates end,
            a.prompt_tokens, a.max_output_tokens)
       or ((a.attempt).attempt_id is null) <> (a.kind = 'queued')
       or ((a.attempt).rates).input > (a.ceiling).input
       or ((a.attempt).rates).cached_input > (a.ceiling).cached_input
       or ((a.attempt).rates).output > (a.ceiling).output
  ) then
    raise exception using errcode = 'check_violation', constraint = 'hot_admit',
      message = 'an admission must hold its worst case, stay within its ceiling, and start with an attempt unless queued';
  end if;

  for r in
    select a.ordinality::int as place, a.credit_account_id, a.hold_nano, h.id is not null as repeated,
           (min(a.ordinality) over (partition by a.job_id))::int as first_place,
           case when c.status = 'open'
                then b.posted_nano - b.held_nano - coalesce(b.floor_nano, -4000000000000000000)
           end as left_nano
    from unnest(admits) with ordinality a
    left join ledger_balances b on b.account_id = a.credit_account_id
    left join ledger_accounts c on c.id = b.account_id
    left join ledger_holds h on h.id = a.job_id
    order by a.credit_account_id, a.ordinality
  loop
    if account is distinct from r.credit_account_id then
      account := r.credit_account_id;
      left_nano := r.left_nano;
    end if;
    if r.repeated then
      ok[r.place] := true;
    elsif r.first_place < r.place then
      ok[r.place] := ok[r.first_place];
    elsif left_nano is not null and r.hold_nano <= left_nano then
      left_nano := left_nano - r.hold_nano;
      ok[r.place] := true;
      written[r.place] := true;
    end if;
    available[r.place] := coalesce(left_nano, 0);
  end loop;

  insert into ledger_holds (id, account_id, amount_nano, expires_at)
    select a.job_id, a.credit_account_id, a.hold_nano,
           at_now + make_interval(secs => a.deadline_s + a.hold_margin_s)
    from unnest(admits) with ordinality a where written[a.ordinality];
  update ledger_balances b set held_nano = b.held_nano + s.total_nano
    from (select a.credit_account_id, sum(a.hold_nano)::bigint as total_nano
          from unnest(admits) with ordinality a where written[a.ordinality] group by a.credit_account_id) s
    where b.account_id = s.credit_account_id and s.total_nano <> 0;
  insert into jobs (id, organisation_id, key_id, request_id, kind, state, variant_id, body, prompt_tokens,
                    max_output_tokens, max_input_nano_usd_per_mtok, max_cached_input_nano_usd_per_mtok,
                    max_output_nano_usd_per_mtok, hold_nano, gateway_id, deadline_at, created_at)
    select a.job_id, a.organisation_id, a.key_id, a.request_id, a.kind,
           case when (a.attempt).attempt_id is null then 'queued' else 'running' end,
           a.variant_id, a.body::jsonb, a.prompt_tokens, a.max_output_tokens,
           (a.ceiling).input, (a.ceiling).cached_input, (a.ceiling).output, a.hold_nano, a.gateway_id,
           at_now + make_interval(secs => a.deadline_s), at_now
    from unnest(admits) with ordinality a where written[a.ordinality];
  insert into attempts (id, job_id, epoch, node_id, offer_id, gateway_id, price_id, input_nano_usd_per_mtok,
                        cached_input_nano_usd_per_mtok, output_nano_usd_per_mtok, lease_expires_at, leased_at)
    select (a.attempt).attempt_id, a.job_id, 1, (a.attempt).node_id, (a.attempt).offer_id, (a.attempt).gateway_id,
           (a.attempt).price_id, ((a.attempt).rates).input, ((a.attempt).rates).cached_input,
           ((a.attempt).rates).output, at_now + make_interval(secs => (a.attempt).lease_s), at_now
    from unnest(admits) with ordinality a where written[a.ordinality] and (a.attempt).attempt_id is not null;
  -- One nudge for the whole batch: the task looks at the queue, not at a job.
  insert into outbox (task)
    select 'jobs.assign'
    where exists (select from unnest(admits) with ordinality a where written[a.ordinality] and a.kind = 'queued');

  return (select json_agg(json_build_array(t.ok, t.available) order by t.place)
          from unnest(ok, available) with ordinality as t (ok, available, place));
end $$;


-- Answers [[epoch, reason], ...]; epoch 0 with the reason of the refusal.
create function lease_batch(leases hot_lease[], max_attempts int, max_preemptions int)
returns json language plpgsql as $$
declare
  at_now constant timestamptz := clock_timestamp();
  answers json[] := '{}';
  l hot_lease;
  j jobs;
  before record;
  next_epoch bigint;
  reason text;
begin
  foreach l in array leases loop
    select * into j from jobs where id = l.job_id;
    select coalesce(max(a.epoch), 0) as epoch,
           count(*) filter (where a.fault is distinct from 'owner') as counted,
           bool_or(a.state = 'leased') as leased,
           bool_or(a.fault = 'node' and a.node_id = (l.attempt).node_id) as failed_there,
           max(a.epoch) filter (where a.id = (l.attempt).attempt_id) as repeated_epoch
      into before from attempts a where a.job_id = l.job_id;
    next_epoch := before.epoch + 1;
    reason := case
      when j.id is null then 'unknown'
      when before.repeated_epoch is not null then ''
      when j.state not in ('queued', 'running') then 'ended'
      when j.cancel_requested_at is not null then 'cancelled'
      when j.deadline_at <= at_now then 'deadline'
      when before.leased then 'leased'
      when before.counted >= max_attempts or j.preemptions >= max_preemptions then 'attempts'
      when before.failed_there then 'failed_there'
      when ((l.attempt).rates).input > j.max_input_nano_usd_per_mtok
        or ((l.attempt).rates).cached_input > j.max_cached_input_nano_usd_per_mtok
        or ((l.attempt).rates).output > j.max_output_nano_usd_per_mtok
        or hot_worst_case((l.attempt).rates, j.prompt_tokens, j.max_output_tokens) > j.hold_nano then 'price'
    end;
    if reason = '' then
      next_epoch := before.repeated_epoch;
    elsif reason is null then
      insert into attempts (id, job_id, epoch, node_id, offer_id, gateway_id, price_id, input_nano_usd_per_mtok,
                            cached_input_nano_usd_per_mtok, output_nano_usd_per_mtok, lease_expires_at, leased_at)
        values ((l.attempt).attempt_id, j.id, next_epoch, (l.attempt).node_id, (l.attempt).offer_id,
                (l.attempt).gateway_id, (l.attempt).price_id, ((l.attempt).rates).input,
                ((l.attempt).rates).cached_input, ((l.attempt).rates).output,
                at_now + make_interval(secs => (l.attempt).lease_s), at_now);
      if j.state = 'queued' then
        update jobs set state = 'running' where id = j.id;
      end if;
    else
      next_epoch := 0;
    end if;
    answers := answers || json_build_array(next_epoch, coalesce(reason, ''));
  end loop;
  return array_to_json(answers);
end $$;


-- Answers [[alive, cancel_requested], ...]. A lease never outlasts its job's deadline by more than one lease.
create function checkpoint_batch(checkpoints hot_checkpoint[]) returns json language plpgsql as $$
declare
  at_now constant timestamptz := clock_timestamp();
begin
  update attempts a
    set accepted_tokens = greatest(a.accepted_tokens, c.accepted_tokens),
        first_token_at = case when c.accepted_tokens > 0 then coalesce(a.first_token_at, at_now)
                              else a.first_token_at end,
        lease_expires_at = least(at_now, j.deadline_at) + make_interval(secs => c.lease_s)
    from (select distinct on (attempt_id, epoch) * from unnest(checkpoints)
          order by attempt_id, epoch, accepted_tokens desc) c, jobs j
    where a.id = c.attempt_id and a.epoch = c.epoch and a.ended_at is null and j.id = a.job_id;
  return (
    select json_agg(json_build_array(a.id is not null, j.cancel_requested_at is not null) order by c.ordinality)
    from unnest(checkpoints) with ordinality c
    left join attempts a on a.id = c.attempt_id and a.epoch = c.epoch and a.ended_at is null
    left join jobs j on j.id = a.job_id);
end $$;


-- Why a close cannot be written; null if it can.
create function hot_close_refusal(c hot_close, j jobs, a attempts, other_leased boolean, h ledger_holds)
returns text language sql immutable as $$
  select case
    when j.id is null then 'unknown_job'
    when c.attempt_id is not null and (a.id is null or a.job_id <> j.id) then 'unknown_attempt'
    when c.attempt_id is not null and a.epoch <> c.epoch then 'old_epoch'
    when c.attempt_id is not null and a.state <> 'leased' then 'already_closed'
    when j.state not in ('queued', 'running') then 'already_closed'
    when c.attempt_id is null and other_leased then 'leased'
    when not (c.job_state = 'voided'
              or c.job_state = 'delivered' and a.id is not null and (c.receipt).charge_nano is not null
              or c.job_state = 'running' and j.state = 'running' and a.id is not null
              or c.job_state = 'queued' and j.state = 'running' and j.kind = 'queued') then 'impossible'
    when c.job_state in ('delivered', 'voided') and c.outcome is null then 'impossible'
    when c.job_state <> 'delivered' then null
    when h.state is distinct from 'held' and (c.receipt).charge_nano > 0 then 'hold_gone'
    when (c.receipt).charge_nano > h.amount_nano then 'charge_exceeds_hold'
    when (c.receipt).output_visible_tokens + (c.receipt).output_reasoning_tokens
         > greatest(a.accepted_tokens, c.accepted_tokens) then 'paid_exceeds_accepted'
    -- The price of these tokens at the pinned rates, in millionths of a nano: half a nano is what rounding may move.
    when abs(((c.receipt).charge_nano + (c.receipt).loss_nano)::numeric * 1000000
             - (c.receipt).input_uncached_tokens::numeric * a.input_nano_usd_per_mtok
             - (c.receipt).input_cached_tokens::numeric * a.cached_input_nano_usd_per_mtok
             - ((c.receipt).output_visible_tokens + (c.receipt).output_reasoning_tokens)::numeric
               * a.output_nano_usd_per_mtok) > 500000 then 'price_mismatch'
  end
$$;


-- Answers [[ok, reason], ...]. `replay`: the batch may have been committed before an answer was lost; a close that is
-- found written exactly as wished is then a success.
create function close_batch(closes hot_close[], replay boolean) returns json language plpgsql as $$
declare
  at_now constant timestamptz := clock_timestamp();
  total constant int := cardinality(closes);
  written boolean[] := array_fill(false, array[total]);
  answers json[];
  failed_nodes uuid[];
begin
  with judged as (
    select c.ordinality as place, c.job_id, hot_close_refusal(
             row(c.job_id, c.attempt_id, c.epoch, c.job_state, c.outcome, c.end_code, c.fault, c.accepted_tokens,
                 c.busy_ms, c.first_token, c.endpoint, c.error_code, c.error_message, c.result, c.receipt)::hot_close,
             j, a, (select bool_or(o.state = 'leased') from attempts o where o.job_id = j.id), h) as reason,
           replay
             and coalesce(a.end_code = c.end_code and a.epoch = c.epoch and a.job_id = j.id, c.attempt_id is null)
             and (c.job_state in ('queued', 'running') and a.state = 'ended'
                  or j.outcome = c.outcome
                     and (j.state = c.job_state or c.job_state = 'delivered' and j.state = 'settled')) as found_written
    from unnest(closes) with ordinality c
    left join jobs j on j.id = c.job_id
    left join attempts a on a.id = c.attempt_id
    left join ledger_holds h on h.id = c.job_id
  ), ranked as (
    select place, found_written,
           case when reason is null and row_number() over (partition by job_id, reason is null order by place) > 1
                then 'already_closed' else reason end as reason
    from judged
  )
  select array_agg(reason is null order by place),
         array_agg(json_build_array(
           reason is null or reason = 'already_closed' and coalesce(found_written, false),
           case when reason = 'already_closed' and found_written then '' else coalesce(reason, '') end) order by place)
    into written, answers from ranked;

  update attempts a
    set state = 'ended', ended_at = at_now, end_code = c.end_code, fault = c.fault,
        accepted_tokens = greatest(a.accepted_tokens, c.accepted_tokens),
        first_token_at = case when c.first_token then coalesce(a.first_token_at, at_now) else a.first_token_at end,
        busy_ms = least(c.busy_ms, (extract(epoch from at_now - a.leased_at) * 1000)::bigint)
    from unnest(closes) with ordinality c
    where written[c.ordinality] and a.id = c.attempt_id;
  insert into receipts (id, job_id, renter_organisation_id, key_id, owner_organisation_id, node_id, device_id,
                        variant_id, price_id, outcome, input_uncached_tokens, input_cached_tokens,
                        output_visible_tokens, output_reasoning_tokens, input_uncached_nano, input_cached_nano,
                        output_visible_nano, output_reasoning_nano, charge_nano, fee_nano, owner_nano, loss_nano,
                        simulated, node_signature, at)
    select a.id, j.id, j.organisation_id, j.key_id, (c.receipt).owner_organisation_id, a.node_id,
           (c.receipt).device_id, j.variant_id, a.price_id, c.outcome, (c.receipt).input_uncached_tokens,
           (c.receipt).input_cached_tokens, (c.receipt).output_visible_tokens, (c.receipt).output_reasoning_tokens,
           (c.receipt).input_uncached_nano, (c.receipt).input_cached_nano, (c.receipt).output_visible_nano,
           (c.receipt).output_reasoning_nano, (c.receipt).charge_nano, (c.receipt).fee_nano, (c.receipt).owner_nano,
           (c.receipt).loss_nano, (c.receipt).simulated, decode((c.receipt).node_signature, 'base64'), at_now
    from unnest(closes) with ordinality c
    join attempts a on a.id = c.attempt_id
    join jobs j on j.id = c.job_id
    where written[c.ordinality] and c.job_state = 'delivered';

  -- The balance first, while the hold still says what it was.
  update ledger_balances b set held_nano = b.held_nano - s.freed_nano
    from (select h.account_id, sum(h.amount_nano - case c.job_state when 'delivered' then (c.receipt).charge_nano
                                                                    else 0 end)::bigint as freed_nano
          from unnest(closes) with ordinality c
          join ledger_holds h on h.id = c.job_id and h.resolved_at is null
          where written[c.ordinality] and c.job_state in ('delivered', 'voided')
          group by h.account_id) s
    where b.account_id = s.account_id and s.freed_nano <> 0;
  -- A charge stays held until it is settled, however long that takes: it must not expire like an unused hold.
  -- Where there is no charge, nothing stays held.
  update ledger_holds h
    set amount_nano = (c.receipt).charge_nano, expires_at = at_now + interval '100 years'
    from unnest(closes) with ordinality c
    where written[c.ordinality] and c.job_state = 'delivered' and (c.receipt).charge_nano > 0
      and h.id = c.job_id;
  update ledger_holds h
    set state = 'released', resolved_at = at_now
    from unnest(closes) with ordinality c
    where written[c.ordinality] and h.id = c.job_id and h.resolved_at is null
      and (c.job_state = 'voided' or c.job_state = 'delivered' and (c.receipt).charge_nano = 0);

  update jobs j
    set state = c.job_state,
        preemptions = j.preemptions + case when c.fault = 'owner' then 1 else 0 end,
        outcome = case when c.job_state in ('delivered', 'voided') then c.outcome else j.outcome end,
        error_code = c.error_code, error_message = c.error_message, result = coalesce(c.result::jsonb, j.result),
        ended_at = case when c.job_state in ('delivered', 'voided') then at_now else j.ended_at end
    from unnest(closes) with ordinality c
    where written[c.ordinality] and j.id = c.job_id;
  insert into outcomes (request_id, organisation_id, endpoint, outcome, code, job_id, at)
    select j.request_id, j.organisation_id, c.endpoint, c.outcome, c.error_code, j.id, at_now
    from unnest(closes) with ordinality c
    join jobs j on j.id = c.job_id
    where written[c.ordinality] and c.job_state in ('delivered', 'voided')
    on conflict (request_id) do nothing;

  select array_agg(a.node_id) into failed_nodes
    from unnest(closes) with ordinality c join attempts a on a.id = c.attempt_id
    where written[c.ordinality] and c.fault = 'node';
  if failed_nodes is not null then
    perform 1 from nodes n where n.id = any (failed_nodes) order by n.id for no key update;
    update nodes n set faults = n.faults + s.times
      from (select id, count(*) as times from unnest(failed_nodes) id group by id) s where n.id = s.id;
  end if;
  return array_to_json(answers);
end $$;


create function refuse_batch(refusals hot_refused[]) returns json language sql as $$
  insert into outcomes (request_id, organisation_id, endpoint, outcome, code, at)
    select request_id, organisation_id, endpoint, outcome, code, clock_timestamp() from unnest(refusals)
    on conflict (request_id) do nothing;
  select to_json(array_fill(null::boolean, array[cardinality(refusals)]));
$$;


-- batch: {"admits": [...], "leases": [...], "checkpoints": [...], "closes": [...], "refusals": [...]}, any of them
-- absent. Answers an object of the same names. Closes go first: what they free, an admission may hold.
--
-- Every look-up is by key, for some hundred rows at most. A session plans it once, perhaps while the tables are still
-- empty, and keeps the plan for days: so whatever reads a whole table is ruled out from the start. For the same reason
-- no condition here repeats that of a partial index (state = 'leased', state = 'held'): a plan may then walk the whole
-- of that index and the dead entries that every finished request leaves in it. ended_at and resolved_at say the same.
create function hot_batch(batch json, replay boolean, max_attempts int, max_preemptions int)
returns json language plpgsql
set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off set plan_cache_mode = force_generic_plan
as $$
declare
  admits constant hot_admit[] := array(select r from json_populate_recordset(null::hot_admit, batch -> 'admits') r);
  leases constant hot_lease[] := array(select r from json_populate_recordset(null::hot_lease, batch -> 'leases') r);
  checkpoints constant hot_checkpoint[] :=
    array(select r from json_populate_recordset(null::hot_checkpoint, batch -> 'checkpoints') r);
  closes constant hot_close[] := array(select r from json_populate_recordset(null::hot_close, batch -> 'closes') r);
  refusals constant hot_refused[] :=
    array(select r from json_populate_recordset(null::hot_refused, batch -> 'refusals') r);
  closed json;
  leased json;
  admitted json;
  checkpointed json;
  refused json;
begin
  perform hot_lock(admits, leases, checkpoints, closes);
  if cardinality(closes) > 0 then
    closed := close_batch(closes, replay);
  end if;
  if cardinality(leases) > 0 then
    leased := lease_batch(leases, max_attempts, max_preemptions);
  end if;
  if cardinality(admits) > 0 then
    admitted := admit_batch(admits);
  end if;
  if cardinality(checkpoints) > 0 then
    checkpointed := checkpoint_batch(checkpoints);
  end if;
  if cardinality(refusals) > 0 then
    refused := refuse_batch(refusals);
  end if;
  return json_build_object('closes', closed, 'leases', leased, 'admits', admitted,
                           'checkpoints', checkpointed, 'refusals', refused);
end $$;
