-- What decisions were taken from.

CREATE TABLE decision_records (
    decided_at TIMESTAMP WITH TIME ZONE NOT NULL,
    decision_id UUID NOT NULL,
    session_id UUID NOT NULL,
    task TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    num_running INTEGER NOT NULL,
    num_jobs INTEGER NOT NULL,
    inputs JSON NOT NULL,
    outcome JSON NOT NULL,
    CONSTRAINT pk_decision_records PRIMARY KEY (decided_at, decision_id)
) PARTITION BY RANGE (decided_at);
CREATE INDEX ix_decision_records_task_decided_at ON decision_records (task, decided_at);
COMMENT ON TABLE decision_records IS
    'One row a decision: its inputs, by value or by number, and its outcome';
COMMENT ON COLUMN decision_records.decided_at IS 'The moment of the decision, by the clock of the worker';
COMMENT ON COLUMN decision_records.decision_id IS 'As decode_runs.decode_batch_id of its jobs';
COMMENT ON COLUMN decision_records.session_id IS 'Decision session of a worker; names its decision_inputs';
COMMENT ON COLUMN decision_records.task IS 'Kind of prompt';
COMMENT ON COLUMN decision_records.sampling_bucket IS 'Sampling settings of the jobs';
COMMENT ON COLUMN decision_records.num_running IS 'Sequences of a round, these jobs among them';
COMMENT ON COLUMN decision_records.num_jobs IS 'Jobs that were decided together';
COMMENT ON COLUMN decision_records.inputs IS
    'Jobs, rules, conditions, incumbent, budget; numbers of decision_inputs: session, costs, posteriors, splits';
COMMENT ON COLUMN decision_records.outcome IS 'What was decided for each group of jobs';

CREATE TABLE decision_inputs (
    used_at TIMESTAMP WITH TIME ZONE NOT NULL,
    session_id UUID NOT NULL,
    number INTEGER NOT NULL,
    kind TEXT NOT NULL,
    content JSON NOT NULL,
    CONSTRAINT pk_decision_inputs PRIMARY KEY (session_id, number, used_at),
    CONSTRAINT ck_decision_inputs_kind CHECK (kind IN ('session','cost_basis','costs','pair','posterior','split'))
) PARTITION BY RANGE (used_at);
COMMENT ON TABLE decision_inputs IS
    'Inputs that many decisions share, stored once a day by each session that uses them';
COMMENT ON COLUMN decision_inputs.used_at IS 'The first decision of the day that used it';
COMMENT ON COLUMN decision_inputs.session_id IS 'Decision session that used it';
COMMENT ON COLUMN decision_inputs.number IS 'Name within the session';
COMMENT ON COLUMN decision_inputs.kind IS
    'session: engine, limits, drafters; cost_basis: measured costs; costs: their corrections at a moment; pair, posterior, split: evidence by positions in the ledger (ledger_id)';
COMMENT ON COLUMN decision_inputs.content IS 'The input itself: alphaloop.store.input_codec';
