-- Drafts that are trained anew: who trains them, what with, what became of them.

CREATE TABLE refreshes (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    drafter TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    parent_draft_revision TEXT NOT NULL,
    reason TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'waiting',
    attempt INTEGER NOT NULL DEFAULT 0,
    lease_owner TEXT,
    lease_expires_at timestamptz,
    device_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    figures JSONB,
    sentence TEXT NOT NULL DEFAULT '',
    candidate_name TEXT,
    candidate_revision TEXT,
    location TEXT,
    opened_at timestamptz NOT NULL,
    changed_at timestamptz NOT NULL,
    CONSTRAINT pk_refreshes PRIMARY KEY (id),
    CONSTRAINT ck_refreshes_reason CHECK (reason IN ('by_hand','new_target','draft_stale')),
    CONSTRAINT ck_refreshes_state CHECK
        (state IN ('waiting','training','trial','kept','rejected','failed','cancelled')),
    CONSTRAINT ck_refreshes_candidate CHECK (
        state NOT IN ('trial','kept')
        OR (candidate_name IS NOT NULL AND candidate_revision IS NOT NULL AND location IS NOT NULL)
    )
) WITH (fillfactor = 50);
CREATE UNIQUE INDEX uq_refreshes_open ON refreshes (drafter, target_revision)
    WHERE state IN ('waiting','training','trial');
CREATE INDEX ix_refreshes_changed_at ON refreshes (changed_at);
COMMENT ON TABLE refreshes IS 'Each time that a drafter was, or is to be, trained anew for a target';
COMMENT ON COLUMN refreshes.id IS 'Number of the refresh';
COMMENT ON COLUMN refreshes.drafter IS 'Name of the drafter whose weights training begins with: the parent';
COMMENT ON COLUMN refreshes.target_revision IS 'The target it is trained for';
COMMENT ON COLUMN refreshes.parent_draft_revision IS 'Revision of the parent';
COMMENT ON COLUMN refreshes.reason IS 'by_hand, new_target or draft_stale';
COMMENT ON COLUMN refreshes.state IS
    'waiting, training and trial are open; kept, rejected, failed and cancelled are how it ended';
COMMENT ON COLUMN refreshes.attempt IS 'How often a trainer took it: the newest attempt alone may write';
COMMENT ON COLUMN refreshes.lease_owner IS 'Trainer that has it; null while none has';
COMMENT ON COLUMN refreshes.lease_expires_at IS
    'When another trainer may take it, unless the lease is renewed; of a waiting row the earliest next attempt';
COMMENT ON COLUMN refreshes.device_s IS 'Seconds that trainers had it, over all attempts';
COMMENT ON COLUMN refreshes.figures IS 'Parent and candidate on held-out texts; null before they were judged';
COMMENT ON COLUMN refreshes.sentence IS 'Why it is in this state; empty where nothing is to be said';
COMMENT ON COLUMN refreshes.candidate_name IS 'Name of the candidate as a drafter of its own; null before a trial';
COMMENT ON COLUMN refreshes.candidate_revision IS 'Its revision; null before a trial';
COMMENT ON COLUMN refreshes.location IS 'Address of the folder of its files; null before a trial';
COMMENT ON COLUMN refreshes.opened_at IS 'When it was asked for';
COMMENT ON COLUMN refreshes.changed_at IS 'When its state changed, or its lease was renewed, last';

CREATE TABLE refresh_prompts (
    refresh_id BIGINT NOT NULL,
    job_id TEXT NOT NULL,
    prompt_id TEXT NOT NULL,
    is_held_out BOOLEAN NOT NULL,
    segment TEXT NOT NULL,
    ended_at timestamptz NOT NULL,
    erased_at timestamptz,
    CONSTRAINT pk_refresh_prompts PRIMARY KEY (refresh_id, job_id),
    CONSTRAINT fk_refresh_prompts_refresh_id_refreshes FOREIGN KEY (refresh_id) REFERENCES refreshes (id)
        ON DELETE CASCADE
);
CREATE INDEX ix_refresh_prompts_job_id ON refresh_prompts (job_id);
COMMENT ON TABLE refresh_prompts IS 'Jobs whose prompts a refresh trained or judged with; no texts';
COMMENT ON COLUMN refresh_prompts.refresh_id IS 'The refresh';
COMMENT ON COLUMN refresh_prompts.job_id IS 'Job that brought the prompt';
COMMENT ON COLUMN refresh_prompts.prompt_id IS 'Hash of the prompt, as in probe_prompts';
COMMENT ON COLUMN refresh_prompts.is_held_out IS 'Whether the draft is judged on it and not trained with it';
COMMENT ON COLUMN refresh_prompts.segment IS 'Segment of the job, which outlives the row of the job here';
COMMENT ON COLUMN refresh_prompts.ended_at IS 'When the job ended; when its prompt was taken, of one that had not';
COMMENT ON COLUMN refresh_prompts.erased_at IS 'When the texts of the job were erased; null before';

ALTER TABLE draft_revisions ADD COLUMN trained_for TEXT;
COMMENT ON COLUMN draft_revisions.trained_for IS
    'The target it was trained for; null of one that is not trained, or whose files do not say';
COMMENT ON COLUMN draft_revisions.parent_revision IS
    'Revision of the draft that training began with; null where it began anew';
-- Training wrote here the revision of the target.
UPDATE draft_revisions SET trained_for = parent_revision, parent_revision = NULL WHERE parent_revision IS NOT NULL;

-- A drafter on trial is compared with the one that it may replace too.
ALTER TABLE switchback_slices ADD COLUMN against TEXT NOT NULL DEFAULT '';
COMMENT ON COLUMN switchback_slices.against IS
    'Drafter of the block''s control slice; empty: it is vanilla, or the slice belongs to no block';
COMMENT ON COLUMN switchback_slices.phase IS
    'control is vanilla, or drafts with the drafter that against names; between, before and after are the treatment';
CREATE TABLE rival_speedups (
    LIKE task_speedups INCLUDING COMMENTS,
    against TEXT NOT NULL,
    CONSTRAINT pk_rival_speedups PRIMARY KEY
        (task, sampling_bucket, target_revision, engine, host, device, drafter, draft_revision, against)
);
COMMENT ON TABLE rival_speedups IS
    'The measured speed-up of a drafter over another one, of which one is on trial, over the last day of their slices';
COMMENT ON COLUMN rival_speedups.against IS 'Drafter of the control slices';
COMMENT ON COLUMN rival_speedups.speedup IS 'Measured, over that drafter; null before there are eight blocks';
COMMENT ON COLUMN rival_speedups.num_control_rounds IS 'Rounds of the control slices in them';

-- The rights on the tables of revision 0001 stay where they are.
ALTER FUNCTION grant_to_roles() RENAME TO grant_first_tables;
CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    missing text[] := grant_first_tables();
BEGIN
    IF missing = '{}' THEN
        -- A trainer has the rights of a worker, and leaves out the prompts of probes without reading their texts.
        GRANT SELECT, INSERT, UPDATE ON refreshes TO alphaloop_worker;
        GRANT SELECT, INSERT, UPDATE, DELETE ON refresh_prompts, rival_speedups TO alphaloop_worker;
        GRANT SELECT, INSERT, UPDATE, DELETE ON refreshes, refresh_prompts, rival_speedups TO alphaloop_scheduler;
        GRANT SELECT (task, version, position, prompt_id) ON probe_prompts TO alphaloop_worker;
        GRANT SELECT ON refreshes, refresh_prompts, rival_speedups TO alphaloop_reader;
    END IF;
    RETURN missing;
END
$$;
COMMENT ON FUNCTION grant_first_tables() IS 'What grant_to_roles() does for the tables of revision 0001';
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
SELECT grant_to_roles();
