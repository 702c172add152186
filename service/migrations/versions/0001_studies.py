"""The first released schema: studies and idempotency keys."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "studies",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("description", sa.Text),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text),
        sa.Column("outcome", sa.String(16)),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("started_at", _MOMENT),
        sa.Column("ended_at", _MOMENT),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("first_attempt", sa.Integer, nullable=False),
        sa.Column("attempt_started_at", _MOMENT),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("spec_hash", sa.String(64), nullable=False),
        sa.Column("facts", sa.JSON, nullable=False),
        sa.Column("trials", sa.Integer, nullable=False),
        sa.Column("cells", sa.Integer, nullable=False),
        sa.Column("packs", sa.Integer, nullable=False),
        sa.Column("cost", sa.JSON, nullable=False),
        sa.Column("progress", sa.JSON),
        sa.Column("verdict", sa.JSON),
        sa.Column("mlflow_experiment", sa.String(64)),
        sa.Column("published", sa.Boolean, nullable=False),
    )
    op.create_index("ix_studies_created", "studies", ["created_at", "id"])
    op.create_index("ix_studies_state", "studies", ["state"])
    op.create_table(
        "idempotency_keys",
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("study_id", sa.String(32), sa.ForeignKey("studies.id", ondelete="CASCADE"), nullable=False),
        sa.Column("request_hash", sa.String(64), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("idempotency_keys")
    op.drop_table("studies")
