"""The end of a job does not stumble over a webhook that is deleted at the same moment.

What is told to an endpoint refers to it. Written while somebody deletes the endpoint, it waited for that and was then
refused, and with it the whole record of the job's end. An endpoint that is on its way out is passed by instead.
"""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

TELL = """
create or replace function webhook_tell(organisation uuid, happened text, subject uuid, own_url text) returns void
language plpgsql as $$
begin
  insert into webhook_deliveries (endpoint_id, organisation_id, event, subject_id, url)
    select e.id, organisation, happened, subject, case when e.url is null then own_url end
    from webhook_endpoints e
    where e.organisation_id = organisation and e.disabled_at is null
      and case when e.url is null then own_url is not null else happened = any (e.events) end
    {lock}
    on conflict do nothing;
  if found then
    insert into outbox (task) values ('webhooks.send');
  end if;
end $$;
"""


def upgrade() -> None:
    op.execute(TELL.format(lock="for key share of e skip locked"))


def downgrade() -> None:
    op.execute(TELL.format(lock=""))
