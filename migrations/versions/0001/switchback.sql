-- The switchback experiment: slices of rounds, measured speed-ups, and expectations beside them.

CREATE TABLE switchback_slices (
    started_at timestamptz NOT NULL,
    block_id TEXT NOT NULL,
    phase TEXT NOT NULL,
    task TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    engine TEXT NOT NULL,
    host TEXT NOT NULL,
    device TEXT NOT NULL,
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    num_draft_tokens INTEGER NOT NULL,
    num_rounds BIGINT NOT NULL,
    num_sequence_rounds BIGINT NOT NULL,
    num_tokens BIGINT NOT NULL,
    num_proposed BIGINT NOT NULL,
    sequence_s DOUBLE PRECISION NOT NULL,
    sum_running BIGINT NOT NULL,
    sum_context DOUBLE PRECISION NOT NULL,
    num_prompt_rounds BIGINT NOT NULL,
    num_prompt_sequence_rounds BIGINT NOT NULL,
    num_prompt_tokens BIGINT NOT NULL,
    prompt_sequence_s DOUBLE PRECISION NOT NULL,
    expected_sequence_s DOUBLE PRECISION NOT NULL,
    expected_vanilla_s DOUBLE PRECISION NOT NULL,
    expected_low_s DOUBLE PRECISION NOT NULL,
    expected_high_s DOUBLE PRECISION NOT NULL,
    uncorrected_vanilla_s DOUBLE PRECISION NOT NULL,
    model_sd_s DOUBLE PRECISION NOT NULL,
    sum_elsewhere DOUBLE PRECISION NOT NULL DEFAULT 0,
    owner TEXT NOT NULL,
    CONSTRAINT pk_switchback_slices PRIMARY KEY (started_at, block_id, phase, drafter, num_draft_tokens),
    CONSTRAINT ck_switchback_slices_phase CHECK (phase IN ('between','before','control','after'))
) PARTITION BY RANGE (started_at);
CREATE INDEX ix_switchback_slices_task_started_at ON switchback_slices (task, started_at);
COMMENT ON TABLE switchback_slices IS 'Rounds of a task in one arm of the switchback experiment, added up';
COMMENT ON COLUMN switchback_slices.started_at IS 'When its first round began';
COMMENT ON COLUMN switchback_slices.block_id IS 'The same for slices that are compared with each other';
COMMENT ON COLUMN switchback_slices.phase IS 'control is vanilla; between, before and after are the treatment';
COMMENT ON COLUMN switchback_slices.task IS 'Kind of prompt';
COMMENT ON COLUMN switchback_slices.sampling_bucket IS 'Sampling settings of the sequences';
COMMENT ON COLUMN switchback_slices.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN switchback_slices.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN switchback_slices.host IS 'Machine that decoded';
COMMENT ON COLUMN switchback_slices.device IS 'What decoded on it';
COMMENT ON COLUMN switchback_slices.drafter IS 'Drafter of the treatment';
COMMENT ON COLUMN switchback_slices.draft_revision IS 'Its revision';
COMMENT ON COLUMN switchback_slices.num_draft_tokens IS 'k of the treatment';
COMMENT ON COLUMN switchback_slices.num_rounds IS 'Rounds in which no prompt was read';
COMMENT ON COLUMN switchback_slices.num_sequence_rounds IS 'Sum over these rounds of the task''s sequences';
COMMENT ON COLUMN switchback_slices.num_tokens IS 'Tokens that these sequences put out';
COMMENT ON COLUMN switchback_slices.num_proposed IS 'Draft tokens that the target read for them';
COMMENT ON COLUMN switchback_slices.sequence_s IS 'Sum over these rounds of seconds times the task''s sequences';
COMMENT ON COLUMN switchback_slices.sum_running IS 'Sum over all rounds of the sequences of all tasks';
COMMENT ON COLUMN switchback_slices.sum_context IS 'Sum over all rounds of the mean tokens of context';
COMMENT ON COLUMN switchback_slices.num_prompt_rounds IS 'Rounds in which a prompt was read';
COMMENT ON COLUMN switchback_slices.num_prompt_sequence_rounds IS 'num_sequence_rounds of these';
COMMENT ON COLUMN switchback_slices.num_prompt_tokens IS 'num_tokens of these';
COMMENT ON COLUMN switchback_slices.prompt_sequence_s IS 'sequence_s of these';
COMMENT ON COLUMN switchback_slices.expected_sequence_s IS
    'Sum over all rounds of seconds times sequences with an expected speed-up';
COMMENT ON COLUMN switchback_slices.expected_vanilla_s IS
    'The same times that speed-up: what vanilla rounds were expected to take';
COMMENT ON COLUMN switchback_slices.expected_low_s IS 'The same times its lower 95 % bound';
COMMENT ON COLUMN switchback_slices.expected_high_s IS 'The same times its upper 95 % bound';
COMMENT ON COLUMN switchback_slices.uncorrected_vanilla_s IS
    'The same times the speed-up before earlier measurements corrected it';
COMMENT ON COLUMN switchback_slices.model_sd_s IS 'The same times the standard deviation of the logarithm of that';
COMMENT ON COLUMN switchback_slices.sum_elsewhere IS
    'Sum over all rounds of requests at other endpoints than the task''s; 0 of a device';
COMMENT ON COLUMN switchback_slices.owner IS 'Worker that decoded them';

CREATE TABLE task_speedups (
    task TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    engine TEXT NOT NULL,
    host TEXT NOT NULL,
    device TEXT NOT NULL,
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    min_num_draft_tokens INTEGER NOT NULL,
    max_num_draft_tokens INTEGER NOT NULL,
    mean_running DOUBLE PRECISION NOT NULL,
    mean_context DOUBLE PRECISION NOT NULL,
    num_tokens BIGINT NOT NULL,
    sequence_s DOUBLE PRECISION NOT NULL,
    num_blocks BIGINT NOT NULL,
    num_control_rounds BIGINT NOT NULL,
    control_share DOUBLE PRECISION NOT NULL,
    speedup DOUBLE PRECISION,
    speedup_low DOUBLE PRECISION,
    speedup_high DOUBLE PRECISION,
    verdict TEXT NOT NULL,
    covers_from timestamptz NOT NULL,
    covers_to timestamptz NOT NULL,
    computed_at timestamptz NOT NULL,
        CONSTRAINT pk_task_speedups PRIMARY KEY (task, sampling_bucket, target_revision, engine, host, device, drafter,
        draft_revision)
);
COMMENT ON TABLE task_speedups IS
    'The measured speed-up of each subject of the switchback experiment over the last day of its slices';
COMMENT ON COLUMN task_speedups.task IS 'Kind of prompt';
COMMENT ON COLUMN task_speedups.sampling_bucket IS 'Sampling settings of the sequences';
COMMENT ON COLUMN task_speedups.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN task_speedups.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN task_speedups.host IS 'Machine that decoded';
COMMENT ON COLUMN task_speedups.device IS 'What decoded on it';
COMMENT ON COLUMN task_speedups.drafter IS 'Drafter of the treatment';
COMMENT ON COLUMN task_speedups.draft_revision IS 'Its revision';
COMMENT ON COLUMN task_speedups.min_num_draft_tokens IS 'Smallest k of the treatment';
COMMENT ON COLUMN task_speedups.max_num_draft_tokens IS 'Largest k of the treatment';
COMMENT ON COLUMN task_speedups.mean_running IS 'Sequences of all tasks a round, of the treatment';
COMMENT ON COLUMN task_speedups.mean_context IS 'Tokens of context a sequence, of the treatment';
COMMENT ON COLUMN task_speedups.num_tokens IS 'Tokens that the treatment put out';
COMMENT ON COLUMN task_speedups.sequence_s IS 'Seconds times sequences that this took';
COMMENT ON COLUMN task_speedups.num_blocks IS 'Control slices with the treatment before and after';
COMMENT ON COLUMN task_speedups.num_control_rounds IS 'Vanilla rounds in them';
COMMENT ON COLUMN task_speedups.control_share IS 'Of seconds times sequences, those in control slices';
COMMENT ON COLUMN task_speedups.speedup IS 'Measured, over vanilla; null before there are eight blocks';
COMMENT ON COLUMN task_speedups.speedup_low IS 'Lower 95 % bound';
COMMENT ON COLUMN task_speedups.speedup_high IS 'Upper 95 % bound';
COMMENT ON COLUMN task_speedups.verdict IS 'alphaloop.experiment.estimate.Verdict';
COMMENT ON COLUMN task_speedups.covers_from IS 'When the first slice began';
COMMENT ON COLUMN task_speedups.covers_to IS 'When the last slice began';
COMMENT ON COLUMN task_speedups.computed_at IS 'When it was computed';

CREATE TABLE expectation_pairs (
    task TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    engine TEXT NOT NULL,
    host TEXT NOT NULL,
    device TEXT NOT NULL,
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    expected DOUBLE PRECISION NOT NULL,
    expected_low DOUBLE PRECISION NOT NULL,
    expected_high DOUBLE PRECISION NOT NULL,
    uncorrected DOUBLE PRECISION NOT NULL,
    model_sd DOUBLE PRECISION NOT NULL,
    speedup DOUBLE PRECISION NOT NULL,
    speedup_low DOUBLE PRECISION NOT NULL,
    speedup_high DOUBLE PRECISION NOT NULL,
    num_blocks BIGINT NOT NULL,
    min_num_draft_tokens INTEGER NOT NULL,
    max_num_draft_tokens INTEGER NOT NULL,
    mean_running DOUBLE PRECISION NOT NULL,
    covers_from timestamptz NOT NULL,
    covers_to timestamptz NOT NULL,
    computed_at timestamptz NOT NULL,
        CONSTRAINT pk_expectation_pairs PRIMARY KEY (task, sampling_bucket, target_revision, engine, host, device,
        drafter, draft_revision, covers_from)
);
CREATE INDEX ix_expectation_pairs_computed_at ON expectation_pairs (computed_at);
COMMENT ON TABLE expectation_pairs IS
    'Expected and measured speed-up of a subject over the same rounds, a row for every eight blocks or more';
COMMENT ON COLUMN expectation_pairs.task IS 'Kind of prompt';
COMMENT ON COLUMN expectation_pairs.sampling_bucket IS 'Sampling settings of the sequences';
COMMENT ON COLUMN expectation_pairs.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN expectation_pairs.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN expectation_pairs.host IS 'Machine that decoded';
COMMENT ON COLUMN expectation_pairs.device IS 'What decoded on it';
COMMENT ON COLUMN expectation_pairs.drafter IS 'Drafter of the treatment';
COMMENT ON COLUMN expectation_pairs.draft_revision IS 'Its revision';
COMMENT ON COLUMN expectation_pairs.expected IS 'Expected speed-up, as shown: mean over the rounds';
COMMENT ON COLUMN expectation_pairs.expected_low IS 'Its lower 95 % bound';
COMMENT ON COLUMN expectation_pairs.expected_high IS 'Its upper 95 % bound';
COMMENT ON COLUMN expectation_pairs.uncorrected IS 'Expected before earlier pairs corrected it';
COMMENT ON COLUMN expectation_pairs.model_sd IS 'Standard deviation of its logarithm, by acceptance and costs';
COMMENT ON COLUMN expectation_pairs.speedup IS 'Measured over the same rounds';
COMMENT ON COLUMN expectation_pairs.speedup_low IS 'Its lower 95 % bound';
COMMENT ON COLUMN expectation_pairs.speedup_high IS 'Its upper 95 % bound';
COMMENT ON COLUMN expectation_pairs.num_blocks IS 'Control slices with the treatment before and after';
COMMENT ON COLUMN expectation_pairs.min_num_draft_tokens IS 'Smallest k of the treatment';
COMMENT ON COLUMN expectation_pairs.max_num_draft_tokens IS 'Largest k of the treatment';
COMMENT ON COLUMN expectation_pairs.mean_running IS 'Sequences of all tasks a round, of the treatment';
COMMENT ON COLUMN expectation_pairs.covers_from IS 'When the first slice began';
COMMENT ON COLUMN expectation_pairs.covers_to IS 'When the last slice began';
COMMENT ON COLUMN expectation_pairs.computed_at IS 'When it was computed';
