"""The service's own memory: which studies there are and in which state each is.

Numbers live in the ledger; here is only what the lifecycle needs to go on after a crash.
"""

import enum
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker


class StudyState(enum.StrEnum):
    """QUEUED → RUNNING → ANALYSING → COMPLETED | FAILED | CANCELLED, with CANCELLING between."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    CANCELLING = "CANCELLING"
    ANALYSING = "ANALYSING"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def has_ended(self) -> bool:
        return self in ENDED


ENDED = frozenset({StudyState.COMPLETED, StudyState.FAILED, StudyState.CANCELLED})
ACTIVE = frozenset(StudyState) - ENDED


class StoreError(Exception):
    """Base of what the store raises."""


class StudyUnknown(StoreError):
    """No study of that id."""

    def __init__(self, study_id: str):
        super().__init__(f"there is no study {study_id!r}")


class KeyReused(StoreError):
    """The idempotency key has already been used for another request."""


class StoreUnavailable(StoreError):
    """The database does not answer, or refuses."""


class UtcDateTime(sa.TypeDecorator[datetime]):
    """A moment, always aware and in UTC; SQLite keeps no time zone of its own."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Base(DeclarativeBase):
    """Tables of the service; `service/migrations` makes them."""


class Study(Base):
    """One study. Instances that leave the store are detached: read them, change them through `Store`."""

    __tablename__ = "studies"
    __table_args__ = (
        sa.Index("ix_studies_created", "created_at", "id"),
        sa.Index("ix_studies_state", "state"),
    )

    id: Mapped[str] = mapped_column(sa.String(32), primary_key=True)
    name: Mapped[str] = mapped_column(sa.String(100))
    description: Mapped[str | None] = mapped_column(sa.Text)
    state: Mapped[str] = mapped_column(sa.String(16))
    reason: Mapped[str | None] = mapped_column(sa.Text)
    outcome: Mapped[str | None] = mapped_column(sa.String(16))  # the state that follows ANALYSING
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    attempt: Mapped[int] = mapped_column(default=1)
    first_attempt: Mapped[int] = mapped_column(default=1)  # of this run: `resume` begins a new count
    forgotten: Mapped[int] = mapped_column(default=0)  # attempts of this run that do not count: Ray forgot their job
    attempt_started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    spec: Mapped[str] = mapped_column(sa.Text)  # canonical JSON
    spec_hash: Mapped[str] = mapped_column(sa.String(64))
    facts: Mapped[dict[str, Any]] = mapped_column(sa.JSON)  # trials.spec.DataFacts, as found at submission
    trials: Mapped[int]
    cells: Mapped[int]
    packs: Mapped[int]
    cost: Mapped[dict[str, float]] = mapped_column(sa.JSON)
    progress: Mapped[dict[str, Any] | None] = mapped_column(sa.JSON(none_as_null=True))  # kept once it has ended
    verdict: Mapped[list[dict[str, Any]] | None] = mapped_column(sa.JSON(none_as_null=True))
    mlflow_experiment: Mapped[str | None] = mapped_column(sa.String(64))
    published: Mapped[bool] = mapped_column(default=False)  # MLflow has every finished pack and the artifacts


class IdempotencyKey(Base):
    """A key that a client sent with POST, and the study that came of it."""

    __tablename__ = "idempotency_keys"

    key: Mapped[str] = mapped_column(sa.String(255), primary_key=True)
    study_id: Mapped[str] = mapped_column(sa.ForeignKey("studies.id", ondelete="CASCADE"))
    request_hash: Mapped[str] = mapped_column(sa.String(64))


def new_study_id() -> str:
    """`s` and 12 random hex digits."""
    return "s" + secrets.token_hex(6)


class Store:
    """Studies and idempotency keys in SQLite or PostgreSQL. Duties, the same on both:

    - **Threads and processes**: every method may be called from any thread, and several services
      may open one database; each call is one transaction.
    - **States change by compare-and-set** only (`transition`): of several callers that saw the same
      state, one wins, the others are told `False`, and nothing is half written.
    - **An idempotency key makes one study**, however many requests carry it at the same moment.
    - **What is returned has been committed** and survives `kill -9`.
    - Only errors of this module's tree are raised: a database that is away or locked beyond
      `busy_timeout` is `StoreUnavailable`.

    Args:
        url: `sqlite:///FILE` or `postgresql+psycopg://…`; its tables exist (`migrate.open_store`).
    """

    def __init__(self, url: str):
        self.engine = make_engine(url)
        # SQLite's writers queue from BEGIN on, so none is refused in the middle of its transaction.
        self._writes = sessionmaker(self.engine.execution_options(begin_immediate=True), expire_on_commit=False)
        self._reads = sessionmaker(self.engine, expire_on_commit=False)

    def create(self, study: Study, key: str | None = None, request_hash: str = "") -> tuple[Study, bool]:
        """Add a study; with a key that is known already, return that key's study instead, and False.

        Raises:
            KeyReused: the key came with another request before.
        """
        try:
            with self._session(self._writes) as session:
                session.add(study)
                session.flush()
                if key is not None:
                    session.add(IdempotencyKey(key=key, study_id=study.id, request_hash=request_hash))
                session.commit()
                return study, True
        except IntegrityError:
            earlier = self.by_key(key, request_hash) if key is not None else None
            if earlier is None:  # not the key: the id, whose 48 random bits then met before
                raise StoreUnavailable(f"study id {study.id} is taken; send the request again") from None
            return earlier, False

    def by_key(self, key: str, request_hash: str) -> Study | None:
        """The study that came of an idempotency key.

        Raises:
            KeyReused: the key came with another request before.
        """
        with self._session(self._reads) as session:
            known = session.get(IdempotencyKey, key)
            if known is None:
                return None
            if known.request_hash != request_hash:
                raise KeyReused(f"the key {key!r} was used for another study before; use a new key for a new request")
            return session.get_one(Study, known.study_id)

    def get(self, study_id: str) -> Study:
        """
        Raises:
            StudyUnknown: no study of that id.
        """
        study = None
        if "\0" not in study_id:  # which PostgreSQL's text cannot have
            with self._session(self._reads) as session:
                study = session.get(Study, study_id)
        if study is None:
            raise StudyUnknown(study_id)
        return study

    def page(
        self,
        limit: int,
        *,
        state: StudyState | None = None,
        text: str | None = None,
        after: tuple[datetime, str] | None = None,
    ) -> list[Study]:
        """Studies, newest first, that come after the one with `(created_at, id)`.

        Args:
            text: part of the name, in any case, or the start of the id.
        """
        query = sa.select(Study).order_by(Study.created_at.desc(), Study.id.desc()).limit(limit)
        if state is not None:
            query = query.where(Study.state == state)
        if text:
            named = sa.func.lower(Study.name).contains(text.lower(), autoescape=True)
            query = query.where(named | Study.id.startswith(text.lower(), autoescape=True))
        if after is not None:
            at, study_id = after
            query = query.where((Study.created_at < at) | ((Study.created_at == at) & (Study.id < study_id)))
        with self._session(self._reads) as session:
            return list(session.scalars(query))

    def active(self) -> list[Study]:
        """Studies that have not ended, oldest first."""
        query = sa.select(Study).where(Study.state.in_(ACTIVE)).order_by(Study.created_at, Study.id)
        with self._session(self._reads) as session:
            return list(session.scalars(query))

    def unpublished(self) -> list[Study]:
        """Studies that have ended and that MLflow does not have completely, oldest first."""
        query = sa.select(Study).where(Study.state.in_(ENDED), Study.published.is_(False))
        with self._session(self._reads) as session:
            return list(session.scalars(query.order_by(Study.created_at, Study.id)))

    def transition(
        self,
        study_id: str,
        before: StudyState | Sequence[StudyState],
        after: StudyState,
        *,
        attempt: int | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> bool:
        """Compare-and-set: move to `after`, with `changes` of other columns, if the study is still in a
        state of `before` (and, where given, in that attempt). Returns whether it was.
        """
        states = [before] if isinstance(before, StudyState) else list(before)
        query = sa.update(Study).where(Study.id == study_id, Study.state.in_(states))
        if attempt is not None:
            query = query.where(Study.attempt == attempt)
        return self._update(query.values(state=after, **(changes or {})))

    def note(self, study: Study, **changes: Any) -> bool:
        """Change columns other than the state, if state and attempt are still those of `study`."""
        query = sa.update(Study).where(Study.id == study.id, Study.state == study.state, Study.attempt == study.attempt)
        return self._update(query.values(**changes))

    def check(self) -> None:
        """Write a row, and take it back: a database that only reads is no use.

        Raises:
            StoreUnavailable: the database does not answer, or does not take the row.
        """
        probe = {"id": new_study_id(), "name": "probe", "state": StudyState.QUEUED, "created_at": datetime.now(UTC)}
        probe |= {"spec": "{}", "spec_hash": "", "facts": {}, "cost": {}, "trials": 0, "cells": 0, "packs": 0}
        with self._session(self._writes) as session:
            session.execute(sa.insert(Study).values(**probe))
            session.rollback()

    def close(self) -> None:
        self.engine.dispose()

    def _update(self, query: sa.Update) -> bool:
        with self._session(self._writes) as session:
            result = session.execute(query.execution_options(synchronize_session=False))
            session.commit()
            return bool(getattr(result, "rowcount", 0))

    @contextmanager
    def _session(self, factory: sessionmaker[Session]) -> Iterator[Session]:
        with translated(), factory() as session:
            yield session


@contextmanager
def translated() -> Iterator[None]:
    """The edge to SQLAlchemy: its errors leave as `StoreUnavailable`, save a broken constraint."""
    try:
        yield
    except IntegrityError:
        raise
    except DBAPIError as error:
        raise StoreUnavailable(str(error.orig).strip().splitlines()[0]) from error
    except SQLAlchemyError as error:
        raise StoreUnavailable(str(error).splitlines()[0]) from error


def make_engine(url: str) -> sa.Engine:
    """An engine with what each database needs for many threads."""
    parsed = sa.make_url(url)
    if parsed.get_backend_name() == "postgresql":
        return sa.create_engine(
            parsed, pool_pre_ping=True, pool_size=10, max_overflow=40, connect_args={"connect_timeout": 5}
        )
    if parsed.database:
        Path(os.path.abspath(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
    engine = sa.create_engine(parsed, pool_size=10, max_overflow=40)

    @event.listens_for(engine, "connect")
    def _prepare(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin where `_begin` says, not where sqlite3 guesses
        cursor = connection.cursor()
        cursor.execute("PRAGMA busy_timeout=30000")
        cursor.execute("PRAGMA journal_mode=WAL")
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
        cursor.close()

    @event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        immediate = connection.get_execution_options().get("begin_immediate", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")

    return engine
