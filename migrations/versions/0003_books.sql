-- Books: periods that close, a hash chain over what was posted, checkpoints of balances, bounds of accounts, roles.
--
-- Nothing here makes writers wait for each other. A journal takes its book's advisory lock in shared mode; only the
-- start of a close, which must know that nobody is half-way through posting, takes it alone. Closing entries have a lock
-- of their own besides, since the end of a close must know that of them alone.

insert into ledger_currencies (code, minor_places) values ('USD', 2);
insert into ledger_books (id, code, fingerprints_after_id)
  values (1, 'main', (select coalesce(max(id), 0) from ledger_journals));

alter table ledger_accounts add constraint fk_ledger_accounts_book_id foreign key (book_id) references ledger_books (id);
alter table ledger_accounts
  add constraint fk_ledger_accounts_currency foreign key (currency) references ledger_currencies (code);
alter table ledger_journals add constraint fk_ledger_journals_book_id foreign key (book_id) references ledger_books (id);

-- What was written before there was a chain is sealed as it is found.
alter table ledger_postings disable trigger ledger_postings_append_only;
update ledger_postings p set effective_at = j.effective_at, recorded_at = j.recorded_at
  from ledger_journals j where j.id = p.journal_id;
alter table ledger_postings enable trigger ledger_postings_append_only;
alter table ledger_postings alter column effective_at set not null, alter column recorded_at set not null,
  alter column recorded_at set default now();
insert into ledger_unsealed (journal_id, book_id) select id, book_id from ledger_journals;


-- --- journals ------------------------------------------------------------------------------------------------------

create function ledger_journal_admitted() returns trigger language plpgsql as $$
declare
  book ledger_books;
  original ledger_journals;
begin
  -- On an older snapshot a period that has just closed would still look open.
  if current_setting('transaction_isolation') <> 'read committed' then
    raise exception using errcode = 'object_not_in_prerequisite_state', constraint = tg_name, table = tg_table_name,
      message = 'journals are written at the isolation level read committed';
  end if;
  if new.closing_entry then
    perform pg_advisory_xact_lock_shared(1818584169, new.book_id::int);
  end if;
  perform pg_advisory_xact_lock_shared(1818584167, new.book_id::int);
  select * into book from ledger_books where id = new.book_id;
  if new.effective_at < book.closed_through
     or new.effective_at < book.closing_through and not new.closing_entry then
    raise exception using
      errcode = 'integrity_constraint_violation', constraint = 'ledger_period_open', table = tg_table_name,
      message = format('%s lies in a period of book %s that is %s; post a correction into an open one',
                       new.effective_at, book.code,
                       case when new.effective_at < book.closed_through then 'closed' else 'closing' end);
  end if;
  if new.reverses_id is not null then
    select * into original from ledger_journals where id = new.reverses_id;
    if original.reverses_id is not null or original.book_id <> new.book_id then
      raise exception using
        errcode = 'integrity_constraint_violation', constraint = 'ledger_reversal', table = tg_table_name,
        message = format('journal %s is itself a reversal, or of another book', new.reverses_id);
    end if;
    new.corrects_period_id := null;
    if original.effective_at < book.closed_through then
      select id into new.corrects_period_id from ledger_periods
        where book_id = new.book_id and state = 'closed' and ends_at > original.effective_at order by ends_at limit 1;
    end if;
  elsif new.corrects_period_id is not null and not exists (
      select from ledger_periods where id = new.corrects_period_id and book_id = new.book_id and state = 'closed') then
    raise exception using
      errcode = 'integrity_constraint_violation', constraint = 'ledger_correction', table = tg_table_name,
      message = format('period %s of book %s is not closed: nothing to correct', new.corrects_period_id, book.code);
  end if;
  return new;
end $$;

create trigger ledger_journal_admitted before insert on ledger_journals
  for each row execute function ledger_journal_admitted();

-- Reversals of one journal wait for each other here, and are judged together: at commit, when all lines are there.
create function ledger_reversal_within() returns trigger language plpgsql as $$
declare
  beyond text;
begin
  perform pg_advisory_xact_lock(hashtextextended('ledger_reversal', new.reverses_id));
  select string_agg(format('%s of account %s', -taken, account_id), ', ') into beyond
    from (select p.account_id, p.currency,
                 coalesce(sum(p.amount_nano) filter (where p.journal_id = new.reverses_id), 0) as given,
                 coalesce(sum(p.amount_nano) filter (where p.journal_id <> new.reverses_id), 0) as taken
          from ledger_postings p
          where p.journal_id = new.reverses_id
             or p.journal_id in (select id from ledger_journals where reverses_id = new.reverses_id)
          group by p.account_id, p.currency) s
    where taken * sign(given) not between -abs(given) and 0 or given = 0 and taken <> 0;
  if beyond is not null then
    raise exception using
      errcode = 'integrity_constraint_violation', constraint = 'ledger_reversal', table = tg_table_name,
      message = format('reversals of journal %s take back more than it moved: %s', new.reverses_id, beyond);
  end if;
  return null;
end $$;

create constraint trigger ledger_reversal_within after insert on ledger_journals
  deferrable initially deferred for each row when (new.reverses_id is not null)
  execute function ledger_reversal_within();

create function ledger_journals_queued() returns trigger language plpgsql as $$
begin
  insert into ledger_unsealed (journal_id, book_id) select id, book_id from added;
  return null;
end $$;

create trigger ledger_journals_queued after insert on ledger_journals
  referencing new table as added for each statement execute function ledger_journals_queued();


-- --- postings ------------------------------------------------------------------------------------------------------

create function ledger_posting_dated() returns trigger language plpgsql as $$
begin
  select effective_at into new.effective_at from ledger_journals where id = new.journal_id;
  return new;
end $$;

create trigger ledger_posting_dated before insert on ledger_postings
  for each row when (new.effective_at is null) execute function ledger_posting_dated();

create function ledger_postings_match() returns trigger language plpgsql as $$
begin
  if exists (
    select from added p
    join ledger_journals j on j.id = p.journal_id
    join ledger_accounts a on a.id = p.account_id
    where p.effective_at <> j.effective_at or p.recorded_at <> j.recorded_at or a.book_id <> j.book_id) then
    raise exception using
      errcode = 'integrity_constraint_violation', constraint = tg_name, table = tg_table_name,
      message = 'a line has the times of its journal, and an account of the same book';
  end if;
  return null;
end $$;

create trigger ledger_postings_match after insert on ledger_postings
  referencing new table as added for each statement execute function ledger_postings_match();


-- --- what never changes --------------------------------------------------------------------------------------------

create trigger ledger_accounts_fixed before update on ledger_accounts for each row
  when ((old.id, old.code, old.kind, old.currency, old.reference, old.checked, old.book_id)
        is distinct from (new.id, new.code, new.kind, new.currency, new.reference, new.checked, new.book_id)
        or old.status = 'closed' and new.status <> 'closed')
  execute function fallow_refuse('only the status of an account changes, and closed is final');
create trigger ledger_accounts_kept before delete on ledger_accounts
  for each row execute function fallow_refuse('accounts are kept');
create trigger ledger_balances_kept before delete on ledger_balances
  for each row execute function fallow_refuse('balances are kept');
create trigger ledger_holds_kept before delete on ledger_holds
  for each row execute function fallow_refuse('holds are kept');
create trigger ledger_holds_in_time before update on ledger_holds for each row
  when (new.state = 'captured' and old.expires_at <= now())
  execute function fallow_refuse('the hold has expired');

create trigger ledger_chain_append_only before update or delete on ledger_chain
  for each row execute function fallow_refuse('the chain is append-only');
create trigger ledger_chain_no_truncate before truncate on ledger_chain
  for each statement execute function fallow_refuse('the chain is append-only');

create trigger ledger_periods_final before update on ledger_periods for each row
  when (old.state = 'closed'
        or (old.book_id, old.starts_at, old.ends_at) is distinct from (new.book_id, new.starts_at, new.ends_at))
  execute function fallow_refuse('a closed period is final, and no period moves');
create trigger ledger_periods_kept before delete on ledger_periods
  for each row execute function fallow_refuse('periods are kept');


-- --- roles ---------------------------------------------------------------------------------------------------------

-- fallow_app may do what the product does, fallow_read may look. Neither can log in: an operator grants them to the
-- users that do. Whoever migrates owns the tables; the gateways and workers need not be, and then no trigger is all that
-- stands between them and the history.
do $$
declare
  here constant text := quote_ident(current_schema());
  role_name text;
begin
  foreach role_name in array array['fallow_app', 'fallow_read'] loop
    begin
      execute format('create role %I nologin', role_name);
    exception
      when duplicate_object or unique_violation then null;
      when insufficient_privilege then
        if not exists (select from pg_roles where rolname = role_name) then
          raise warning 'role % does not exist and % may not create it: triggers alone will guard the history',
            role_name, current_user;
          return;
        end if;
    end;
  end loop;
  execute format('grant usage on schema %s to fallow_app, fallow_read', here);
  execute format('grant select on all tables in schema %s to fallow_app, fallow_read', here);
  execute format('grant insert, update, delete on all tables in schema %s to fallow_app', here);
  execute format('alter default privileges in schema %s grant select on tables to fallow_app, fallow_read', here);
  execute format('alter default privileges in schema %s grant insert, update, delete on tables to fallow_app', here);
  revoke insert, update, delete on ledger_currencies, alembic_version from fallow_app;
  revoke update, delete on ledger_journals, ledger_postings, ledger_chain, ledger_books, ledger_accounts,
    ledger_periods, ledger_holds, receipts, prices from fallow_app;
  revoke delete on ledger_balances from fallow_app;
  grant update (closed_through, closing_through, sealed_sequence, sealed_sha256) on ledger_books to fallow_app;
  grant update (status) on ledger_accounts to fallow_app;
  grant update (state, closed_at, chain_sequence, chain_sha256, journals, postings, snapshot, snapshot_sha256)
    on ledger_periods to fallow_app;
  grant update (amount_nano, captured_nano, state, expires_at, resolved_at) on ledger_holds to fallow_app;
  grant update (journal_id) on receipts to fallow_app;
end $$;
