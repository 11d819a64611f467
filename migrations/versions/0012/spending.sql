-- What a job's device time is paid by, and for whom.

ALTER TABLE decode_runs ADD COLUMN target TEXT NOT NULL DEFAULT '', ADD COLUMN batch_id TEXT;
COMMENT ON COLUMN decode_runs.target IS
    'Name of the target that decoded it (models.target.name); empty of rows from before revision 0012';
COMMENT ON COLUMN decode_runs.batch_id IS 'The caller''s group of jobs; null without, and before revision 0012';
COMMENT ON COLUMN decode_runs.device_s IS
    'The job''s share of the device''s time: each round''s divided by its sequences, of a server its requests in flight';
CREATE INDEX ix_decode_runs_batch_id ON decode_runs (batch_id) WHERE batch_id IS NOT NULL;

CREATE VIEW job_spending AS
SELECT
    runs.decoded_at,
    runs.job_id,
    runs.task,
    runs.segment,
    runs.target,
    runs.batch_id,
    batch.key_name,
    runs.purpose,
    runs.mode,
    runs.num_prompt_tokens,
    runs.num_tokens,
    runs.wall_s,
    runs.device_s
FROM decode_runs AS runs LEFT JOIN api_batches AS batch ON batch.id = runs.batch_id;
COMMENT ON VIEW job_spending IS 'The device time and tokens of each decoded job, and for whom';
COMMENT ON COLUMN job_spending.decoded_at IS 'When the last token was decoded';
COMMENT ON COLUMN job_spending.job_id IS 'The job';
COMMENT ON COLUMN job_spending.task IS 'Kind of prompt';
COMMENT ON COLUMN job_spending.segment IS 'Caller''s label; empty without one';
COMMENT ON COLUMN job_spending.target IS 'Name of the target that decoded it';
COMMENT ON COLUMN job_spending.batch_id IS 'The caller''s group of jobs; null without';
COMMENT ON COLUMN job_spending.key_name IS 'Key of the API that sent the batch; null of other jobs';
COMMENT ON COLUMN job_spending.purpose IS 'traffic, probe or control';
COMMENT ON COLUMN job_spending.mode IS 'vanilla or speculative';
COMMENT ON COLUMN job_spending.num_prompt_tokens IS 'Tokens of the prompt';
COMMENT ON COLUMN job_spending.num_tokens IS 'Tokens generated';
COMMENT ON COLUMN job_spending.wall_s IS 'Seconds of decoding';
COMMENT ON COLUMN job_spending.device_s IS 'The job''s share of the device''s time; shares of a round add up to the round';

ALTER FUNCTION grant_to_roles() RENAME TO grant_tables_of_0011;
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := grant_tables_of_0011();
BEGIN
    IF missing = '{}' THEN
        GRANT SELECT ON job_spending TO alphaloop_worker, alphaloop_scheduler, alphaloop_reader;
    END IF;
    RETURN missing;
END
$$;
COMMENT ON FUNCTION grant_tables_of_0011() IS 'What grant_to_roles() does for the tables of revisions 0001 and 0011';
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
SELECT grant_to_roles();
