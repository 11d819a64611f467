-- What rounds cost, what was decided, and from what.

CREATE TABLE cost_profiles (
    host TEXT NOT NULL,
    device TEXT NOT NULL,
    engine TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    batch INTEGER NOT NULL,
    width INTEGER NOT NULL,
    context INTEGER NOT NULL DEFAULT 256,
    kind TEXT NOT NULL DEFAULT 'round',
    median_ms DOUBLE PRECISION NOT NULL,
    num_samples INTEGER NOT NULL,
    measured_at timestamptz NOT NULL DEFAULT now(),
    correction DOUBLE PRECISION NOT NULL DEFAULT 1,
    num_corrections BIGINT NOT NULL DEFAULT 0,
    correction_variance DOUBLE PRECISION NOT NULL DEFAULT 0,
    corrected_at timestamptz,
        CONSTRAINT pk_cost_profiles PRIMARY KEY (host, device, engine, target_revision, drafter, draft_revision, batch,
        width, context, kind),
    CONSTRAINT ck_cost_profiles_correction CHECK (correction > 0),
    CONSTRAINT ck_cost_profiles_correction_variance CHECK (correction_variance >= 0),
    CONSTRAINT ck_cost_profiles_kind CHECK (kind IN ('round','prefill','served')),
    CONSTRAINT ck_cost_profiles_median_ms CHECK (median_ms > 0)
);
COMMENT ON TABLE cost_profiles IS 'What a round costs on a device of a machine';
COMMENT ON COLUMN cost_profiles.host IS 'Machine that was measured';
COMMENT ON COLUMN cost_profiles.device IS 'What was measured on it';
COMMENT ON COLUMN cost_profiles.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN cost_profiles.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN cost_profiles.drafter IS 'Empty: the target''s pass; else the time of this drafter''s proposal';
COMMENT ON COLUMN cost_profiles.draft_revision IS 'Empty for the target';
COMMENT ON COLUMN cost_profiles.batch IS 'Sequences; on servers, requests in flight at one of them';
COMMENT ON COLUMN cost_profiles.width IS 'Target positions a sequence, k + 1; of a prefill, the prompt''s tokens';
COMMENT ON COLUMN cost_profiles.context IS 'Tokens before, a sequence';
COMMENT ON COLUMN cost_profiles.kind IS 'round, prefill, or served: a whole round on a server';
COMMENT ON COLUMN cost_profiles.median_ms IS 'Median milliseconds, as measured';
COMMENT ON COLUMN cost_profiles.num_samples IS 'Timings of the median';
COMMENT ON COLUMN cost_profiles.measured_at IS 'When';
COMMENT ON COLUMN cost_profiles.correction IS 'What real rounds took, over median_ms';
COMMENT ON COLUMN cost_profiles.num_corrections IS 'Real rounds of about this shape in the correction';
COMMENT ON COLUMN cost_profiles.correction_variance IS 'Variance of ln(correction)';
COMMENT ON COLUMN cost_profiles.corrected_at IS 'When the correction was last stored; null if never';

CREATE TABLE decisions (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    decided_at timestamptz NOT NULL DEFAULT now(),
    task TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    device TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    batch INTEGER NOT NULL,
    from_mode TEXT,
    from_drafter TEXT,
    from_num_draft_tokens INTEGER,
    to_mode TEXT NOT NULL,
    to_drafter TEXT,
    to_num_draft_tokens INTEGER NOT NULL,
    reason TEXT NOT NULL,
    explanation TEXT NOT NULL,
    owner TEXT NOT NULL,
    tokens_per_round DOUBLE PRECISION,
    round_ms DOUBLE PRECISION,
    speedup DOUBLE PRECISION,
    speedup_low DOUBLE PRECISION,
    speedup_high DOUBLE PRECISION,
    rival_drafter TEXT,
    rival_num_draft_tokens INTEGER,
    rival_speedup DOUBLE PRECISION,
    rival_speedup_low DOUBLE PRECISION,
    rival_speedup_high DOUBLE PRECISION,
    jobs DOUBLE PRECISION,
    trials DOUBLE PRECISION[],
    accepts DOUBLE PRECISION[],
    CONSTRAINT pk_decisions PRIMARY KEY (id)
);
CREATE INDEX ix_decisions_task_decided_at ON decisions (task, decided_at);
CREATE INDEX ix_decisions_decided_at ON decisions (decided_at, id);
COMMENT ON TABLE decisions IS
    'When a task''s choice changed, from what to what, and why; exploration and forced modes are not choices';
COMMENT ON COLUMN decisions.id IS 'Order';
COMMENT ON COLUMN decisions.decided_at IS 'When the choice changed';
COMMENT ON COLUMN decisions.task IS 'Kind of prompt';
COMMENT ON COLUMN decisions.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN decisions.device IS 'Where it applies';
COMMENT ON COLUMN decisions.sampling_bucket IS 'Sampling settings it applies to';
COMMENT ON COLUMN decisions.batch IS 'Batch size it was decided at';
COMMENT ON COLUMN decisions.from_mode IS 'Before; null for the first decision';
COMMENT ON COLUMN decisions.from_drafter IS 'Before';
COMMENT ON COLUMN decisions.from_num_draft_tokens IS 'Before';
COMMENT ON COLUMN decisions.to_mode IS 'Now';
COMMENT ON COLUMN decisions.to_drafter IS 'Now; null for vanilla';
COMMENT ON COLUMN decisions.to_num_draft_tokens IS 'Now; 0 for vanilla';
COMMENT ON COLUMN decisions.reason IS 'alphaloop.deciding.decision.Reason';
COMMENT ON COLUMN decisions.explanation IS 'The reason in words, with its figures';
COMMENT ON COLUMN decisions.owner IS 'Worker that decided';
COMMENT ON COLUMN decisions.tokens_per_round IS 'Expected of the new choice; null if no alternatives were compared';
COMMENT ON COLUMN decisions.round_ms IS 'Expected milliseconds of such a round';
COMMENT ON COLUMN decisions.speedup IS 'Expected goodput over vanilla';
COMMENT ON COLUMN decisions.speedup_low IS 'Lower 95 % bound';
COMMENT ON COLUMN decisions.speedup_high IS 'Upper 95 % bound';
COMMENT ON COLUMN decisions.rival_drafter IS 'Drafter of the best other alternative; null for vanilla';
COMMENT ON COLUMN decisions.rival_num_draft_tokens IS 'Its k; null where there was none';
COMMENT ON COLUMN decisions.rival_speedup IS 'Its expected goodput over vanilla';
COMMENT ON COLUMN decisions.rival_speedup_low IS 'Lower 95 % bound';
COMMENT ON COLUMN decisions.rival_speedup_high IS 'Upper 95 % bound';
COMMENT ON COLUMN decisions.jobs IS
    'Jobs of the drafter in the task, weighted by age; of the rival''s drafter, if vanilla was chosen';
COMMENT ON COLUMN decisions.trials IS 'Weighted trials of these jobs, by position';
COMMENT ON COLUMN decisions.accepts IS 'Weighted accepts of these jobs, by position';

CREATE TABLE decision_snapshots (
    decided_at timestamptz NOT NULL,
    decision_id UUID NOT NULL,
    task TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    num_running INTEGER NOT NULL,
    snapshot JSON NOT NULL,
    CONSTRAINT pk_decision_snapshots PRIMARY KEY (decided_at, decision_id)
) PARTITION BY RANGE (decided_at);
CREATE INDEX ix_decision_snapshots_task_decided_at ON decision_snapshots (task, decided_at);
COMMENT ON TABLE decision_snapshots IS 'One row a decision: what it was taken from, and its outcome; at most 4 KiB';
COMMENT ON COLUMN decision_snapshots.decided_at IS 'The moment of the decision, by the clock of the worker';
COMMENT ON COLUMN decision_snapshots.decision_id IS 'As decode_runs.decode_batch_id of its jobs';
COMMENT ON COLUMN decision_snapshots.task IS 'Kind of prompt';
COMMENT ON COLUMN decision_snapshots.sampling_bucket IS 'Sampling settings of the jobs';
COMMENT ON COLUMN decision_snapshots.num_running IS 'Sequences of a round, these jobs among them';
COMMENT ON COLUMN decision_snapshots.snapshot IS
    'alphaloop.deciding.snapshot: evidence, costs, budget and limits, and what was decided';

CREATE TABLE exploration_budgets (
    task TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    device TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    balance DOUBLE PRECISION NOT NULL,
    accrued DOUBLE PRECISION NOT NULL,
    spent DOUBLE PRECISION NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_exploration_budgets PRIMARY KEY (task, target_revision, device, sampling_bucket)
);
COMMENT ON TABLE exploration_budgets IS
    'What a task may still lose to exploration: one budget for all workers, kept over restarts';
COMMENT ON COLUMN exploration_budgets.task IS 'Kind of prompt';
COMMENT ON COLUMN exploration_budgets.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN exploration_budgets.device IS 'What decodes it';
COMMENT ON COLUMN exploration_budgets.sampling_bucket IS 'Sampling settings it is for';
COMMENT ON COLUMN exploration_budgets.balance IS 'Tokens that exploration may still be expected to lose';
COMMENT ON COLUMN exploration_budgets.accrued IS 'Tokens of credit so far';
COMMENT ON COLUMN exploration_budgets.spent IS 'Tokens spent so far';
COMMENT ON COLUMN exploration_budgets.changed_at IS 'When a worker last changed it';
