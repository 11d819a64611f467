-- What the drift test remembers between two runs.

CREATE TABLE drift_positions (
    task TEXT NOT NULL,
    decoded_at TIMESTAMP WITH TIME ZONE NOT NULL,
    ledger_id BIGINT NOT NULL,
    CONSTRAINT pk_drift_positions PRIMARY KEY (task)
);
COMMENT ON TABLE drift_positions IS
    'How far the drift test has read, by task';
COMMENT ON COLUMN drift_positions.task IS 'Kind of prompt';
COMMENT ON COLUMN drift_positions.decoded_at IS 'The last job that the drift test has read of this task: when it was decoded';
COMMENT ON COLUMN drift_positions.ledger_id IS 'And its place among jobs of the same moment';

CREATE TABLE drift_memories (
    task TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    engine TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    version INTEGER NOT NULL,
    document JSONB NOT NULL,
    last_decoded_at TIMESTAMP WITH TIME ZONE NOT NULL,
    norm_since TIMESTAMP WITH TIME ZONE,
    CONSTRAINT pk_drift_memories PRIMARY KEY (task, target_revision, engine, sampling_bucket, drafter, draft_revision)
);
COMMENT ON TABLE drift_memories IS
    'What the drift test remembers of a stream, so that a run reads only new jobs';
COMMENT ON COLUMN drift_memories.task IS 'Kind of prompt';
COMMENT ON COLUMN drift_memories.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN drift_memories.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN drift_memories.sampling_bucket IS 'Sampling settings that share a history';
COMMENT ON COLUMN drift_memories.drafter IS 'Name of the drafter';
COMMENT ON COLUMN drift_memories.draft_revision IS 'Its revision';
COMMENT ON COLUMN drift_memories.version IS 'Form of `document`; another one is learned anew';
COMMENT ON COLUMN drift_memories.document IS 'Reference, running sums and windows: scheduler.drift.memory';
COMMENT ON COLUMN drift_memories.last_decoded_at IS 'When the stream''s last job was decoded';
COMMENT ON COLUMN drift_memories.norm_since IS 'When its level was accepted: jobs from before are forgotten; null otherwise';
