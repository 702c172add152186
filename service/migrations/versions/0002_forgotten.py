"""Attempts whose job Ray forgot, which do not count against a study."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("studies", sa.Column("forgotten", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    op.drop_column("studies", "forgotten")
