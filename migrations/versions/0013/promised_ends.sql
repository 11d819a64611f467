-- When batches were promised to end, and when they did.

CREATE TABLE promised_ends (
    batch_id TEXT NOT NULL,
    promised_at timestamptz NOT NULL,
    num_total INTEGER NOT NULL,
    num_open INTEGER NOT NULL,
    ends_at timestamptz,
    earliest_at timestamptz,
    latest_at timestamptz,
    median_s DOUBLE PRECISION,
    sd_s DOUBLE PRECISION,
    why TEXT,
    ended_at timestamptz,
    CONSTRAINT pk_promised_ends PRIMARY KEY (batch_id, promised_at),
    CONSTRAINT ck_promised_ends_why CHECK (
        CASE WHEN why IS NULL THEN num_nulls(ends_at, earliest_at, latest_at, median_s, sd_s) = 0
        ELSE num_nonnulls(ends_at, earliest_at, latest_at, median_s, sd_s) = 0 END
    )
);
CREATE INDEX ix_promised_ends_promised_at ON promised_ends (promised_at);
CREATE INDEX ix_promised_ends_ended_at ON promised_ends (ended_at) WHERE ended_at IS NOT NULL;
COMMENT ON TABLE promised_ends IS 'When batches were promised to end, and when they did';
COMMENT ON COLUMN promised_ends.batch_id IS 'Batch of the API, or the batch_id of a producer';
COMMENT ON COLUMN promised_ends.promised_at IS 'When it was said';
COMMENT ON COLUMN promised_ends.num_total IS 'Requests of the batch, as far as they were known';
COMMENT ON COLUMN promised_ends.num_open IS 'Requests of these that had not ended';
COMMENT ON COLUMN promised_ends.ends_at IS 'When it was expected to end; null where that was not known';
COMMENT ON COLUMN promised_ends.earliest_at IS 'Lower end of the 95 % interval';
COMMENT ON COLUMN promised_ends.latest_at IS 'Upper end of the 95 % interval';
COMMENT ON COLUMN promised_ends.median_s IS
    'Seconds from promised_at to the end, before earlier promises were looked at';
COMMENT ON COLUMN promised_ends.sd_s IS 'Standard deviation of median_s, before earlier promises were looked at';
COMMENT ON COLUMN promised_ends.why IS 'Why the end was not known; null where it was';
COMMENT ON COLUMN promised_ends.ended_at IS 'When it ended; null while it is open';

ALTER FUNCTION grant_to_roles() RENAME TO grant_tables_of_0012;
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := grant_tables_of_0012();
BEGIN
    IF missing = '{}' THEN
        GRANT SELECT, INSERT, UPDATE, DELETE ON promised_ends TO alphaloop_scheduler;
        GRANT SELECT ON promised_ends TO alphaloop_worker, alphaloop_reader;
    END IF;
    RETURN missing;
END
$$;
COMMENT ON FUNCTION grant_tables_of_0012() IS 'What grant_to_roles() does for the tables of revisions before 0013';
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
SELECT grant_to_roles();
