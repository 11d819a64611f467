-- Deadlines of batches that will be missed with the workers that run, and the ends of batches.

CREATE TABLE lacks (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    target TEXT NOT NULL,
    segment TEXT NOT NULL,
    opened_at timestamptz NOT NULL,
    said_at timestamptz NOT NULL,
    said_late DOUBLE PRECISION NOT NULL,
    foreseen_at timestamptz NOT NULL,
    num_due INTEGER NOT NULL,
    num_late INTEGER NOT NULL,
    num_workers INTEGER NOT NULL,
    num_enough INTEGER,
    until_at timestamptz NOT NULL,
    sentence TEXT NOT NULL,
    closed_at timestamptz,
    closed_because TEXT,
    CONSTRAINT pk_lacks PRIMARY KEY (id),
    CONSTRAINT ck_lacks_closed_after_opened CHECK (closed_at IS NULL OR closed_at >= opened_at),
    CONSTRAINT ck_lacks_closed_with_reason CHECK ((closed_at IS NULL) = (closed_because IS NULL)),
    CONSTRAINT ck_lacks_num_late CHECK (num_late <= num_due)
);
CREATE UNIQUE INDEX uq_lacks_open ON lacks (target, segment) WHERE closed_at IS NULL;
CREATE INDEX ix_lacks_said_at ON lacks (said_at);
COMMENT ON TABLE lacks IS 'Deadlines of batches that will be missed with the workers that run';
COMMENT ON COLUMN lacks.id IS 'Order; a new one each time that it is notified anew';
COMMENT ON COLUMN lacks.target IS 'Target whose workers are too few';
COMMENT ON COLUMN lacks.segment IS 'Segment of the requests; empty without one';
COMMENT ON COLUMN lacks.opened_at IS 'Since when it is known';
COMMENT ON COLUMN lacks.said_at IS 'When it was notified last: at first, and whenever the late share had doubled';
COMMENT ON COLUMN lacks.said_late IS 'Late share of the requests at said_at';
COMMENT ON COLUMN lacks.foreseen_at IS 'When the numbers were computed last';
COMMENT ON COLUMN lacks.num_due IS 'Requests of batches whose deadlines come within a day';
COMMENT ON COLUMN lacks.num_late IS 'Of these, expected to miss them; those of the last opening where it is closed';
COMMENT ON COLUMN lacks.num_workers IS 'Workers of the target that ran';
COMMENT ON COLUMN lacks.num_enough IS 'Workers with which all are met that can be; null where that is not known';
COMMENT ON COLUMN lacks.until_at IS 'The last of the deadlines';
COMMENT ON COLUMN lacks.sentence IS 'The same in words';
COMMENT ON COLUMN lacks.closed_at IS 'When it was over; null while it is open';
COMMENT ON COLUMN lacks.closed_because IS 'Why it was over';

CREATE TABLE ended_batches (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    batch_id TEXT NOT NULL,
    created_at timestamptz NOT NULL,
    ended_at timestamptz NOT NULL,
    state TEXT NOT NULL,
    by_status json NOT NULL,
    num_failed INTEGER NOT NULL,
    promised_at timestamptz,
    ends_at timestamptz,
    earliest_at timestamptz,
    latest_at timestamptz,
    CONSTRAINT pk_ended_batches PRIMARY KEY (id),
    CONSTRAINT uq_ended_batches_batch_id_ended_at UNIQUE (batch_id, ended_at),
    CONSTRAINT ck_ended_batches_promised CHECK (num_nulls(promised_at, ends_at, earliest_at, latest_at) IN (0, 4))
);
CREATE INDEX ix_ended_batches_ended_at ON ended_batches (ended_at);
COMMENT ON TABLE ended_batches IS
    'Batches that have ended, whoever sent them; one whose dead letters were sent again ends anew';
COMMENT ON COLUMN ended_batches.id IS 'Order in which a scheduler saw them';
COMMENT ON COLUMN ended_batches.batch_id IS 'Batch of the API, or the batch_id of a producer';
COMMENT ON COLUMN ended_batches.created_at IS 'When it was submitted, or a job of it was claimed first';
COMMENT ON COLUMN ended_batches.ended_at IS 'When its last request ended; one of the API, when its files were written';
COMMENT ON COLUMN ended_batches.state IS 'completed, failed, expired or cancelled';
COMMENT ON COLUMN ended_batches.by_status IS 'Its requests by what became of them';
COMMENT ON COLUMN ended_batches.num_failed IS 'Requests that ended without a text';
COMMENT ON COLUMN ended_batches.promised_at IS 'When its end was promised first; null where it never was';
COMMENT ON COLUMN ended_batches.ends_at IS 'The end that was promised then';
COMMENT ON COLUMN ended_batches.earliest_at IS 'Lower end of the 95 % interval';
COMMENT ON COLUMN ended_batches.latest_at IS 'Upper end of the 95 % interval';

ALTER TABLE notifications DROP CONSTRAINT ck_notifications_kind;
ALTER TABLE notifications ADD CONSTRAINT ck_notifications_kind CHECK (kind IN
    ('drift','incident_opened','incident_closed','report','lack_opened','lack_closed','batch_ended'));
COMMENT ON COLUMN notifications.kind IS
    'drift, incident_opened, incident_closed, report, lack_opened, lack_closed or batch_ended';
COMMENT ON COLUMN notifications.source_id IS 'id in drift_event_states, incidents, reports, lacks or ended_batches';

ALTER FUNCTION grant_to_roles() RENAME TO grant_tables_of_0014;
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := grant_tables_of_0014();
BEGIN
    IF missing = '{}' THEN
        GRANT SELECT, INSERT, UPDATE, DELETE ON lacks, ended_batches TO alphaloop_scheduler;
        GRANT SELECT ON lacks, ended_batches TO alphaloop_worker, alphaloop_reader;
    END IF;
    RETURN missing;
END
$$;
COMMENT ON FUNCTION grant_tables_of_0014() IS 'What grant_to_roles() does for the tables of revisions before 0015';
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
SELECT grant_to_roles();
