-- Texts stay in jobs.outcome: these tables only refer to it.

CREATE TABLE reusable_results (
    reuse_key BYTEA NOT NULL,
    job_id TEXT NOT NULL,
    decoded_at timestamptz NOT NULL,
    CONSTRAINT pk_reusable_results PRIMARY KEY (reuse_key)
);
CREATE INDEX ix_reusable_results_decoded_at ON reusable_results (decoded_at);
COMMENT ON TABLE reusable_results IS
    'The newest decoded job of each key whose text may answer an equal job; the text is in jobs.outcome';
COMMENT ON COLUMN reusable_results.reuse_key IS
    'SHA-256 of all that decides a greedy text: task, segment, target and its revision, engine, prompt, settings';
COMMENT ON COLUMN reusable_results.job_id IS 'Job that was decoded';
COMMENT ON COLUMN reusable_results.decoded_at IS 'When its last token was decoded';

CREATE TABLE reused_results (
    job_id TEXT NOT NULL,
    source_job_id TEXT NOT NULL,
    task TEXT NOT NULL,
    segment TEXT NOT NULL,
    decoded_at timestamptz NOT NULL,
    reused_at timestamptz NOT NULL,
    CONSTRAINT pk_reused_results PRIMARY KEY (job_id)
);
CREATE INDEX ix_reused_results_source_job_id ON reused_results (source_job_id);
CREATE INDEX ix_reused_results_reused_at ON reused_results (reused_at);
COMMENT ON TABLE reused_results IS 'One row a job that was answered with the text of an equal job; it has no decode_runs';
COMMENT ON COLUMN reused_results.job_id IS 'Job that was answered';
COMMENT ON COLUMN reused_results.source_job_id IS 'Job whose text it has, the one that was decoded';
COMMENT ON COLUMN reused_results.task IS 'Task of both';
COMMENT ON COLUMN reused_results.segment IS 'Segment of both; empty without one';
COMMENT ON COLUMN reused_results.decoded_at IS 'When that text was decoded';
COMMENT ON COLUMN reused_results.reused_at IS 'When the job was answered';

ALTER FUNCTION grant_to_roles() RENAME TO grant_tables_of_0013;
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := grant_tables_of_0013();
BEGIN
    IF missing = '{}' THEN
        GRANT SELECT, INSERT, UPDATE ON reusable_results TO alphaloop_worker;
        GRANT SELECT, INSERT ON reused_results TO alphaloop_worker;
        GRANT SELECT, UPDATE, DELETE ON reusable_results, reused_results TO alphaloop_scheduler;
        GRANT SELECT ON reused_results TO alphaloop_reader;
        -- A key is a digest of a prompt, which whoever guesses the prompt can compute.
        GRANT SELECT (job_id, decoded_at) ON reusable_results TO alphaloop_reader;
    END IF;
    RETURN missing;
END
$$;
COMMENT ON FUNCTION grant_tables_of_0013() IS 'What grant_to_roles() does for the tables of revisions before 0014';
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
SELECT grant_to_roles();
