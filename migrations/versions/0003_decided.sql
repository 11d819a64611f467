-- What decisions were taken from.

CREATE TABLE decision_snapshots (
    decided_at TIMESTAMP WITH TIME ZONE NOT NULL,
    decision_id UUID NOT NULL,
    task TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    num_running INTEGER NOT NULL,
    snapshot JSON NOT NULL,
    CONSTRAINT pk_decision_snapshots PRIMARY KEY (decided_at, decision_id)
) PARTITION BY RANGE (decided_at);
CREATE INDEX ix_decision_snapshots_task_decided_at ON decision_snapshots (task, decided_at);
COMMENT ON TABLE decision_snapshots IS
    'One row a decision: what it was taken from, and its outcome; at most 4 KiB';
COMMENT ON COLUMN decision_snapshots.decided_at IS 'The moment of the decision, by the clock of the worker';
COMMENT ON COLUMN decision_snapshots.decision_id IS 'As decode_runs.decode_batch_id of its jobs';
COMMENT ON COLUMN decision_snapshots.task IS 'Kind of prompt';
COMMENT ON COLUMN decision_snapshots.sampling_bucket IS 'Sampling settings of the jobs';
COMMENT ON COLUMN decision_snapshots.num_running IS 'Sequences of a round, these jobs among them';
COMMENT ON COLUMN decision_snapshots.snapshot IS
    'alphaloop.deciding.snapshot: evidence, costs, budget and limits, and what was decided';
