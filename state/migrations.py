"""The schema of state.db, step by step forward; a step that has been released is never edited."""

from __future__ import annotations

from sqlite_utils import Database, Migrations

APPLICATION_ID = 0x52544348  # "RTCH": tells our file from any other SQLite file

migrations = Migrations("ratchet")


@migrations()
def m001_events_and_projections(db: Database) -> None:
    """Events, and the tables that are folded from them. STRICT, so that a wrong type raises."""
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    for statement in _TABLES.split(";\n"):
        if statement.strip():
            db.execute(statement)


@migrations()
def m002_views(db: Database) -> None:
    """One view per question that a person asks in sqlite3 or Datasette."""
    for statement in _VIEWS.split(";\n"):
        if statement.strip():
            db.execute(statement)


@migrations()
def m003_answers(db: Database) -> None:
    """What was answered to the fixed prompts after a run, apart from its figures because it is large."""
    db.execute("ALTER TABLE measurements ADD COLUMN answers TEXT")


@migrations()
def m004_exchanges(db: Database) -> None:
    """What was said to a language model and what it answered; the timeline tells of it."""
    for statement in (*_EXCHANGES.split(";\n"), "DROP VIEW v_timeline", _timeline_with_exchanges()):
        db.execute(statement)


@migrations()
def m005_todo_history(db: Database) -> None:
    """Every change of mind about a todo; a person's words and the host's window in the timeline."""
    for statement in (_TODO_HISTORY, "DROP VIEW v_timeline", _timeline_with_words()):
        db.execute(statement)


_TABLES = """
CREATE TABLE events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, session_id TEXT NOT NULL, at REAL NOT NULL,
    kind TEXT NOT NULL, body TEXT NOT NULL CHECK (json_valid(body))
) STRICT;
CREATE INDEX events_by_session ON events (session_id, kind);
CREATE TRIGGER events_are_never_changed BEFORE UPDATE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only') END_OF_TRIGGER
CREATE TRIGGER events_are_never_deleted BEFORE DELETE ON events
    BEGIN SELECT RAISE(ABORT, 'events are append-only') END_OF_TRIGGER
CREATE TABLE sessions (
    id TEXT PRIMARY KEY, target TEXT NOT NULL, status TEXT NOT NULL, reason TEXT NOT NULL,
    exit_code INTEGER, started_at REAL NOT NULL, ended_at REAL, epoch INTEGER NOT NULL,
    config TEXT NOT NULL, config_revision TEXT NOT NULL, workload_revision TEXT NOT NULL,
    adoption TEXT NOT NULL, agent_pid INTEGER, attached INTEGER NOT NULL
) STRICT;
CREATE TABLE specs (fingerprint TEXT PRIMARY KEY, body TEXT NOT NULL) STRICT;
CREATE TABLE roles (
    session_id TEXT NOT NULL, role TEXT NOT NULL, fingerprint TEXT NOT NULL, reason TEXT NOT NULL,
    at REAL NOT NULL, PRIMARY KEY (session_id, role)
) STRICT;
CREATE TABLE todos (
    session_id TEXT NOT NULL, id TEXT NOT NULL, position INTEGER NOT NULL, status TEXT NOT NULL,
    priority REAL NOT NULL, reason TEXT NOT NULL, identity TEXT NOT NULL, parent TEXT, candidate TEXT,
    epoch INTEGER, body TEXT NOT NULL, PRIMARY KEY (session_id, id)
) STRICT;
CREATE TABLE effects (
    key TEXT PRIMARY KEY, session_id TEXT NOT NULL, intent TEXT NOT NULL, intended_at REAL NOT NULL,
    closed_by TEXT, outcome TEXT, closed_at REAL
) STRICT;
CREATE TABLE trials (
    id TEXT PRIMARY KEY, session_id TEXT NOT NULL, experiment_id TEXT NOT NULL, status TEXT NOT NULL,
    fingerprint TEXT NOT NULL, opened_at REAL NOT NULL, closed_at REAL, body TEXT NOT NULL
) STRICT;
CREATE TABLE measurements (
    id TEXT PRIMARY KEY, session_id TEXT NOT NULL, experiment_id TEXT NOT NULL, trial_id TEXT NOT NULL,
    arm TEXT NOT NULL, load_point TEXT NOT NULL, status TEXT NOT NULL, opened_at REAL NOT NULL,
    closed_at REAL, body TEXT NOT NULL, raw TEXT
) STRICT;
CREATE INDEX measurements_by_experiment ON measurements (session_id, experiment_id);
CREATE TABLE verdicts (
    session_id TEXT NOT NULL, experiment_id TEXT NOT NULL, outcome TEXT NOT NULL, at REAL NOT NULL,
    body TEXT NOT NULL, PRIMARY KEY (session_id, experiment_id)
) STRICT;
CREATE TABLE decisions (
    id TEXT PRIMARY KEY, session_id TEXT NOT NULL, kind TEXT NOT NULL, subject TEXT NOT NULL,
    what TEXT NOT NULL, reason TEXT NOT NULL, evidence TEXT NOT NULL, at REAL NOT NULL
) STRICT;
CREATE TABLE findings (
    id TEXT PRIMARY KEY, session_id TEXT NOT NULL, statement TEXT NOT NULL, evidence TEXT NOT NULL,
    scope TEXT NOT NULL, at REAL NOT NULL
) STRICT
""".replace(" END_OF_TRIGGER", "; END;")


_VIEWS = """
CREATE VIEW v_decisions AS
    SELECT session_id, id, datetime(at, 'unixepoch') AS at, kind, subject, what, reason, evidence
    FROM decisions ORDER BY at, CAST(substr(id, 2) AS INTEGER);
CREATE VIEW v_experiments AS
    SELECT t.session_id, t.position, t.id, json_extract(t.body, '$.title') AS title, t.status, t.priority,
        v.outcome,
        round(100 * (exp(json_extract(v.body, '$.objective.estimate')) - 1), 2) AS gain_percent,
        round(100 * (exp(json_extract(v.body, '$.objective.low')) - 1), 2) AS low_percent,
        round(100 * (exp(json_extract(v.body, '$.objective.high')) - 1), 2) AS high_percent,
        coalesce(json_extract(v.body, '$.reason'), t.reason) AS reason
    FROM todos t LEFT JOIN verdicts v ON v.session_id = t.session_id AND v.experiment_id = t.id
    ORDER BY t.session_id, t.position;
CREATE VIEW v_measurements AS
    SELECT m.session_id, m.id, m.experiment_id, m.trial_id, m.arm, m.load_point, m.status,
        json_extract(m.body, '$.seed') AS seed,
        round(json_extract(m.body, '$.metrics.output_tok_s'), 2) AS output_tok_s,
        round(json_extract(m.body, '$.metrics.ttft_ms.p50'), 1) AS ttft_p50_ms,
        round(json_extract(m.body, '$.metrics.tpot_ms.p50'), 2) AS tpot_p50_ms,
        round(json_extract(m.body, '$.telemetry.foreign_cpu_cores'), 2) AS foreign_cpu_cores,
        json_extract(m.body, '$.reasons') AS reasons, t.fingerprint
    FROM measurements m JOIN trials t ON t.id = m.trial_id ORDER BY m.opened_at;
CREATE VIEW v_findings AS
    SELECT session_id, id, datetime(at, 'unixepoch') AS at, statement, scope, evidence FROM findings ORDER BY at;
CREATE VIEW v_downtime AS
    SELECT t.session_id, t.id AS trial_id, t.experiment_id, t.status,
        round(json_extract(t.body, '$.down_s'), 2) AS down_s,
        round(sum(json_extract(t.body, '$.down_s')) OVER (PARTITION BY t.session_id ORDER BY t.opened_at), 2)
            AS total_down_s,
        v.outcome AS bought
    FROM trials t LEFT JOIN verdicts v ON v.session_id = t.session_id AND v.experiment_id = t.experiment_id
    ORDER BY t.opened_at;
CREATE VIEW v_timeline AS
    SELECT seq, session_id, datetime(at, 'unixepoch') AS at, kind,
        CASE kind
            WHEN 'session-opened' THEN 'session on ' || json_extract(body, '$.target')
            WHEN 'session-moved' THEN json_extract(body, '$.status') || ': ' || json_extract(body, '$.reason')
            WHEN 'agent-attached' THEN 'agent process ' || json_extract(body, '$.pid')
            WHEN 'role-set' THEN json_extract(body, '$.role') || ' is now ' || json_extract(body, '$.fingerprint')
                || ': ' || json_extract(body, '$.reason')
            WHEN 'todo-added' THEN json_extract(body, '$.experiment.id') || ': '
                || json_extract(body, '$.experiment.title')
            WHEN 'todo-changed' THEN json_extract(body, '$.experiment_id') || ' '
                || coalesce(json_extract(body, '$.status'), 'priority ' || json_extract(body, '$.priority'), '')
                || ': ' || json_extract(body, '$.reason')
            WHEN 'trial-opened' THEN json_extract(body, '$.trial.id') || ' launches '
                || json_extract(body, '$.trial.fingerprint')
            WHEN 'trial-closed' THEN json_extract(body, '$.trial.id') || ' '
                || json_extract(body, '$.trial.status')
                || coalesce(': ' || json_extract(body, '$.trial.failure.cause'), '')
            WHEN 'measurement-closed' THEN json_extract(body, '$.measurement.id') || ' '
                || json_extract(body, '$.measurement.arm') || ' at '
                || json_extract(body, '$.measurement.load_point') || ': '
                || json_extract(body, '$.measurement.status') || ' '
                || coalesce(round(json_extract(body, '$.measurement.metrics.output_tok_s'), 1) || ' tok/s', '')
            WHEN 'verdict-reached' THEN json_extract(body, '$.verdict.experiment_id') || ' '
                || json_extract(body, '$.verdict.outcome') || ': ' || json_extract(body, '$.verdict.reason')
            WHEN 'decision-made' THEN json_extract(body, '$.decision.id') || ' '
                || json_extract(body, '$.decision.kind') || ' ' || json_extract(body, '$.decision.what')
                || ' because ' || json_extract(body, '$.decision.reason')
            WHEN 'finding-made' THEN json_extract(body, '$.finding.statement')
            WHEN 'noted' THEN json_extract(body, '$.text')
            ELSE ''
        END AS story
    FROM events WHERE kind NOT IN ('spec-seen', 'comparison-opened', 'measurement-opened',
        'effect-intended', 'effect-closed') ORDER BY seq
"""


_EXCHANGES = """
CREATE TABLE exchanges (
    id TEXT PRIMARY KEY, session_id TEXT NOT NULL, round INTEGER NOT NULL, opened_at REAL NOT NULL,
    closed_at REAL, ask TEXT NOT NULL, reply TEXT
) STRICT;
CREATE VIEW v_exchanges AS
    SELECT session_id, id, round, datetime(opened_at, 'unixepoch') AS at,
        json_extract(ask, '$.model') AS model, json_extract(ask, '$.prompt') AS prompt,
        json_extract(reply, '$.silence') AS silence, json_extract(reply, '$.finish') AS finish,
        round(json_extract(reply, '$.seconds'), 1) AS seconds,
        json_extract(reply, '$.tokens') AS tokens, json_extract(reply, '$.cost') AS cost,
        json_extract(reply, '$.text') AS answer
    FROM exchanges ORDER BY opened_at, CAST(substr(id, 2) AS INTEGER)
"""


def _timeline_with_exchanges() -> str:
    """The timeline's view as it was released, with two more kinds of events."""
    (released,) = [statement for statement in _VIEWS.split(";\n") if "VIEW v_timeline" in statement]
    told = """WHEN 'exchange-opened' THEN json_extract(body, '$.ask.id') || ' asks '
                || json_extract(body, '$.ask.model')
            WHEN 'exchange-closed' THEN json_extract(body, '$.exchange_id') || ' '
                || coalesce(json_extract(body, '$.reply.silence'), 'answered, '
                || json_extract(body, '$.reply.tokens') || ' tokens')
            """
    return released.replace("WHEN 'noted'", told + "WHEN 'noted'")


_TODO_HISTORY = """
CREATE VIEW v_todo_history AS
    WITH steps AS (
        SELECT seq, session_id, at, json_extract(body, '$.experiment.id') AS todo,
            CASE coalesce(json_extract(body, '$.origin'), '')
                WHEN '' THEN json_extract(body, '$.experiment.source.kind') ELSE 'carry-over' END AS who,
            coalesce(json_extract(body, '$.status'), 'pending') AS status,
            json_extract(body, '$.experiment.priority') AS priority,
            json_extract(body, '$.reason') AS reason
        FROM events WHERE kind = 'todo-added'
        UNION ALL
        SELECT seq, session_id, at, json_extract(body, '$.experiment_id'),
            coalesce(json_extract(body, '$.by'), 'evidence'), json_extract(body, '$.status'),
            json_extract(body, '$.priority'), json_extract(body, '$.reason')
        FROM events WHERE kind = 'todo-changed'
            AND coalesce(json_extract(body, '$.status'), json_extract(body, '$.priority')) IS NOT NULL
        UNION ALL
        SELECT seq, session_id, at, json_extract(body, '$.experiment_id'), 'agent', 'in_progress', NULL, 'chosen'
        FROM events WHERE kind = 'comparison-opened'
    )
    SELECT session_id, todo, seq, datetime(at, 'unixepoch') AS at, who,
        (SELECT b.status FROM steps b WHERE b.session_id = s.session_id AND b.todo = s.todo AND b.seq < s.seq
            AND b.status IS NOT NULL ORDER BY b.seq DESC LIMIT 1) AS status_before, status,
        (SELECT b.priority FROM steps b WHERE b.session_id = s.session_id AND b.todo = s.todo AND b.seq < s.seq
            AND b.priority IS NOT NULL ORDER BY b.seq DESC LIMIT 1) AS priority_before, priority, reason
    FROM steps s ORDER BY seq
"""


def _timeline_with_words() -> str:
    """The timeline's view with a person's words, what was carried over, and what the window did."""
    told = """WHEN 'word-heard' THEN json_extract(body, '$.word.id') || ' a person says: '
                || json_extract(body, '$.word.kind') || ' '
                || coalesce(json_extract(body, '$.word.todo'), json_extract(body, '$.word.experiment.id'))
            WHEN 'carried-over' THEN 'takes over the list of session ' || json_extract(body, '$.origin')
            WHEN 'clock-read' THEN 'the host says '
                || datetime(json_extract(body, '$.clock.unix') + json_extract(body, '$.clock.offset_s'), 'unixepoch')
                || ' of its own time; the window is ' || json_extract(body, '$.window')
            WHEN 'window-awaited' THEN round(json_extract(body, '$.seconds') / 60, 1) || ' min waited for the window'
            """
    return _timeline_with_exchanges().replace("WHEN 'noted'", told + "WHEN 'noted'")
