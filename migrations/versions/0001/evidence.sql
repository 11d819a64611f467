-- What was decoded: by job, by hour, by day, as it weighs in decisions, and the texts that look-up searches.

-- One sequence for both tables of the ledger: their rows have one order.
CREATE SEQUENCE ledger_ids;

CREATE TABLE decode_runs (
    decoded_at timestamptz NOT NULL,
    ledger_id BIGINT NOT NULL,
    recorded_in BIGINT NOT NULL,
    recorded_at timestamptz NOT NULL,
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    purpose TEXT NOT NULL,
    task TEXT NOT NULL DEFAULT '',
    segment TEXT NOT NULL DEFAULT '',
    target_revision TEXT NOT NULL DEFAULT '',
    drafter TEXT NOT NULL DEFAULT '',
    draft_revision TEXT NOT NULL DEFAULT '',
    engine TEXT NOT NULL DEFAULT '',
    sampling_bucket TEXT NOT NULL DEFAULT '',
    prompt_bucket TEXT NOT NULL DEFAULT '',
    form_bucket TEXT NOT NULL DEFAULT '',
    is_evidence BOOLEAN NOT NULL,
    mode TEXT NOT NULL,
    num_draft_tokens INTEGER NOT NULL,
    reason TEXT NOT NULL,
    device TEXT NOT NULL,
    rounds BIGINT NOT NULL,
    num_empty_rounds BIGINT NOT NULL,
    num_cropped BIGINT NOT NULL,
    num_forced BIGINT NOT NULL DEFAULT 0,
    proposed BIGINT[] NOT NULL DEFAULT '{}',
    trials BIGINT[] NOT NULL DEFAULT '{}',
    accepts BIGINT[] NOT NULL DEFAULT '{}',
    chances BIGINT[] NOT NULL DEFAULT '{}',
    proposers JSONB,
    num_prompt_tokens BIGINT NOT NULL,
    num_tokens BIGINT NOT NULL,
    is_cut BOOLEAN NOT NULL DEFAULT false,
    batch_size INTEGER NOT NULL,
    num_texts INTEGER NOT NULL DEFAULT 1,
    queue_s DOUBLE PRECISION NOT NULL,
    time_to_first_token_s DOUBLE PRECISION,
    wall_s DOUBLE PRECISION NOT NULL,
    device_s DOUBLE PRECISION NOT NULL,
    decode_batch_id UUID NOT NULL,
    CONSTRAINT pk_decode_runs PRIMARY KEY (decoded_at, ledger_id),
    CONSTRAINT ck_decode_runs_counts_ordered CHECK (array_ge(proposed, trials) AND array_ge(trials, accepts)),
    CONSTRAINT ck_decode_runs_tokens_add_up CHECK (num_tokens = rounds + array_sum(accepts) - num_cropped + num_forced)
) PARTITION BY RANGE (decoded_at);
CREATE INDEX ix_decode_runs_decoded_at ON decode_runs USING brin (decoded_at);
CREATE INDEX ix_decode_runs_job_id ON decode_runs (job_id);
CREATE INDEX ix_decode_runs_task_purpose_decoded_at ON decode_runs (task, purpose, decoded_at);
COMMENT ON TABLE decode_runs IS 'One row a decoded job: counts by draft position under the key of all evidence';
COMMENT ON COLUMN decode_runs.decoded_at IS 'When the job''s last token was decoded';
COMMENT ON COLUMN decode_runs.ledger_id IS 'Order of recording in both tables of the ledger';
COMMENT ON COLUMN decode_runs.recorded_in IS 'Smallest ledger_id of the same transaction: its name';
COMMENT ON COLUMN decode_runs.recorded_at IS 'When that transaction recorded it, by the clock of the database';
COMMENT ON COLUMN decode_runs.job_id IS 'The job';
COMMENT ON COLUMN decode_runs.attempt IS 'The claim that decoded it';
COMMENT ON COLUMN decode_runs.purpose IS 'traffic, probe or control';
COMMENT ON COLUMN decode_runs.task IS 'Kind of prompt';
COMMENT ON COLUMN decode_runs.segment IS 'Caller''s label; empty without one';
COMMENT ON COLUMN decode_runs.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN decode_runs.drafter IS 'Name of the drafter; empty for vanilla';
COMMENT ON COLUMN decode_runs.draft_revision IS 'Revision of the drafter; empty for vanilla';
COMMENT ON COLUMN decode_runs.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN decode_runs.sampling_bucket IS 'Sampling settings that share a history';
COMMENT ON COLUMN decode_runs.prompt_bucket IS 'Prompt lengths that share a history';
COMMENT ON COLUMN decode_runs.form_bucket IS
    'What the text has to match (json, regex, choice, grammar), then tools, images; empty for plain text';
COMMENT ON COLUMN decode_runs.is_evidence IS
    'Whether acceptance_state holds these counts; not of a control, nor where a drafted row says more';
COMMENT ON COLUMN decode_runs.mode IS 'vanilla or speculative';
COMMENT ON COLUMN decode_runs.num_draft_tokens IS 'k, the draft length asked for; 0 is vanilla';
COMMENT ON COLUMN decode_runs.reason IS 'Why this mode: alphaloop.deciding.decision.Reason';
COMMENT ON COLUMN decode_runs.device IS 'What decoded it';
COMMENT ON COLUMN decode_runs.rounds IS 'Target passes that yielded tokens, prefill included';
COMMENT ON COLUMN decode_runs.num_empty_rounds IS 'Rounds in which nothing was proposed';
COMMENT ON COLUMN decode_runs.num_cropped IS 'rounds + accepted + forced - tokens';
COMMENT ON COLUMN decode_runs.num_forced IS
    'Tokens that were the only ones allowed at their place; they are taken without a trial';
COMMENT ON COLUMN decode_runs.proposed IS 'Rounds in which at least this many tokens were proposed';
COMMENT ON COLUMN decode_runs.trials IS 'Rounds in which this position was tested';
COMMENT ON COLUMN decode_runs.accepts IS 'Of the trials, accepted';
COMMENT ON COLUMN decode_runs.chances IS
    'Rounds in which this position was asked for, all before accepted; empty where k never changed';
COMMENT ON COLUMN decode_runs.proposers IS
    'Where several proposers shared the job''s rounds: by proposer, trials and accepts by position; no sum of the counts beside it';
COMMENT ON COLUMN decode_runs.num_prompt_tokens IS 'Tokens of the prompt';
COMMENT ON COLUMN decode_runs.num_tokens IS 'Tokens generated';
COMMENT ON COLUMN decode_runs.is_cut IS 'Whether a limit ended the text, which says only how long it is at least';
COMMENT ON COLUMN decode_runs.batch_size IS 'Most sequences that shared a step with it';
COMMENT ON COLUMN decode_runs.num_texts IS 'Texts of the job, each with a prefill';
COMMENT ON COLUMN decode_runs.queue_s IS 'Seconds from the Kafka timestamp to the start of decoding';
COMMENT ON COLUMN decode_runs.time_to_first_token_s IS 'Seconds from the start of decoding';
COMMENT ON COLUMN decode_runs.wall_s IS 'Seconds of decoding';
COMMENT ON COLUMN decode_runs.device_s IS 'Share of the engine''s seconds: each step''s divided by its batch';
COMMENT ON COLUMN decode_runs.decode_batch_id IS 'The same for jobs that were decided together';

CREATE TABLE evidence_rows (
    decoded_at timestamptz NOT NULL,
    ledger_id BIGINT NOT NULL,
    recorded_in BIGINT NOT NULL,
    recorded_at timestamptz NOT NULL,
    job_id TEXT NOT NULL,
    task TEXT NOT NULL DEFAULT '',
    segment TEXT NOT NULL DEFAULT '',
    target_revision TEXT NOT NULL DEFAULT '',
    drafter TEXT NOT NULL DEFAULT '',
    draft_revision TEXT NOT NULL DEFAULT '',
    engine TEXT NOT NULL DEFAULT '',
    sampling_bucket TEXT NOT NULL DEFAULT '',
    prompt_bucket TEXT NOT NULL DEFAULT '',
    form_bucket TEXT NOT NULL DEFAULT '',
    source TEXT NOT NULL,
    is_whole BOOLEAN NOT NULL,
    num_draft_tokens INTEGER NOT NULL,
    rounds BIGINT NOT NULL,
    num_empty_rounds BIGINT NOT NULL,
    num_cropped BIGINT NOT NULL,
    num_forced BIGINT NOT NULL DEFAULT 0,
    proposed BIGINT[] NOT NULL DEFAULT '{}',
    trials BIGINT[] NOT NULL DEFAULT '{}',
    accepts BIGINT[] NOT NULL DEFAULT '{}',
    chances BIGINT[] NOT NULL DEFAULT '{}',
    num_prompt_tokens BIGINT NOT NULL,
    num_output_tokens BIGINT NOT NULL,
    is_cut BOOLEAN,
    CONSTRAINT pk_evidence_rows PRIMARY KEY (decoded_at, ledger_id),
    CONSTRAINT ck_evidence_rows_counts_ordered CHECK (array_ge(proposed, trials) AND array_ge(trials, accepts)),
    CONSTRAINT ck_evidence_rows_source CHECK (source IN ('shadow','scored','shared_weights','drafted'))
) PARTITION BY RANGE (decoded_at);
CREATE INDEX ix_evidence_rows_task_decoded_at ON evidence_rows (task, decoded_at);
CREATE INDEX ix_evidence_rows_scored_job_id ON evidence_rows (job_id) WHERE source = 'scored';
COMMENT ON TABLE evidence_rows IS 'Counts that a job gave of drafters beside its own: a row each';
COMMENT ON COLUMN evidence_rows.decoded_at IS 'When the job''s last token was decoded';
COMMENT ON COLUMN evidence_rows.ledger_id IS 'Order of recording in both tables of the ledger';
COMMENT ON COLUMN evidence_rows.recorded_in IS 'Smallest ledger_id of the same transaction: its name';
COMMENT ON COLUMN evidence_rows.recorded_at IS 'When that transaction recorded it, by the clock of the database';
COMMENT ON COLUMN evidence_rows.job_id IS 'The job';
COMMENT ON COLUMN evidence_rows.task IS 'Kind of prompt';
COMMENT ON COLUMN evidence_rows.segment IS 'Caller''s label; empty without one';
COMMENT ON COLUMN evidence_rows.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN evidence_rows.drafter IS 'Name of the drafter; empty for vanilla';
COMMENT ON COLUMN evidence_rows.draft_revision IS 'Revision of the drafter; empty for vanilla';
COMMENT ON COLUMN evidence_rows.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN evidence_rows.sampling_bucket IS 'Sampling settings that share a history';
COMMENT ON COLUMN evidence_rows.prompt_bucket IS 'Prompt lengths that share a history';
COMMENT ON COLUMN evidence_rows.form_bucket IS
    'What the text has to match (json, regex, choice, grammar), then tools, images; empty for plain text';
COMMENT ON COLUMN evidence_rows.source IS
    'shadow: scored on a text that others decoded; scored: on a control''s text, for a probe; shared_weights: counted in rounds of a drafter with the same weights; drafted: of a drafter that decoded, its rounds alone or scored at its longest drafts';
COMMENT ON COLUMN evidence_rows.is_whole IS 'Of whole rounds; only these shadows are in the hourly sums';
COMMENT ON COLUMN evidence_rows.num_draft_tokens IS 'k of the counts';
COMMENT ON COLUMN evidence_rows.rounds IS 'Target passes that yielded tokens, prefill included';
COMMENT ON COLUMN evidence_rows.num_empty_rounds IS 'Rounds in which nothing was proposed';
COMMENT ON COLUMN evidence_rows.num_cropped IS 'rounds + accepted + forced - tokens';
COMMENT ON COLUMN evidence_rows.num_forced IS
    'Tokens that were the only ones allowed at their place; they are taken without a trial';
COMMENT ON COLUMN evidence_rows.proposed IS 'Rounds in which at least this many tokens were proposed';
COMMENT ON COLUMN evidence_rows.trials IS 'Rounds in which this position was tested';
COMMENT ON COLUMN evidence_rows.accepts IS 'Of the trials, accepted';
COMMENT ON COLUMN evidence_rows.chances IS
    'Rounds in which this position was asked for, all before accepted; empty where k never changed';
COMMENT ON COLUMN evidence_rows.num_prompt_tokens IS 'Tokens of the prompt';
COMMENT ON COLUMN evidence_rows.num_output_tokens IS 'Tokens of the whole text, without forced ones';
COMMENT ON COLUMN evidence_rows.is_cut IS
    'The same of a row that counts for the job''s length; null where another row of the job does';

CREATE TABLE acceptance_hourly (
    bucket timestamptz NOT NULL,
    task TEXT NOT NULL,
    segment TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    engine TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    prompt_bucket TEXT NOT NULL,
    form_bucket TEXT NOT NULL DEFAULT '',
    purpose TEXT NOT NULL,
    mode TEXT NOT NULL,
    num_draft_tokens INTEGER NOT NULL,
    num_jobs BIGINT NOT NULL DEFAULT 0,
    num_cut BIGINT NOT NULL DEFAULT 0,
    rounds BIGINT NOT NULL DEFAULT 0,
    num_empty_rounds BIGINT NOT NULL DEFAULT 0,
    num_cropped BIGINT NOT NULL DEFAULT 0,
    num_forced BIGINT NOT NULL DEFAULT 0,
    num_prompt_tokens BIGINT NOT NULL DEFAULT 0,
    num_tokens BIGINT NOT NULL DEFAULT 0,
    rounds_sq BIGINT NOT NULL DEFAULT 0,
    tokens_sq BIGINT NOT NULL DEFAULT 0,
    rounds_tokens BIGINT NOT NULL DEFAULT 0,
    proposed BIGINT[] NOT NULL DEFAULT '{}',
    trials BIGINT[] NOT NULL DEFAULT '{}',
    accepts BIGINT[] NOT NULL DEFAULT '{}',
    trials_sq BIGINT[] NOT NULL DEFAULT '{}',
    accepts_sq BIGINT[] NOT NULL DEFAULT '{}',
    accepts_trials BIGINT[] NOT NULL DEFAULT '{}',
    wall_s DOUBLE PRECISION NOT NULL DEFAULT 0,
    device_s DOUBLE PRECISION NOT NULL DEFAULT 0,
        CONSTRAINT pk_acceptance_hourly PRIMARY KEY (bucket, task, segment, target_revision, drafter, draft_revision,
        engine, sampling_bucket, prompt_bucket, purpose, mode, num_draft_tokens, form_bucket)
);
CREATE INDEX ix_acceptance_hourly_task_bucket ON acceptance_hourly (task, bucket);
COMMENT ON TABLE acceptance_hourly IS
    'Counts and sums of decode_runs by hour, and those of shadows in evidence_rows: never rates';
COMMENT ON COLUMN acceptance_hourly.bucket IS 'Start of the hour, UTC';
COMMENT ON COLUMN acceptance_hourly.task IS 'Kind of prompt';
COMMENT ON COLUMN acceptance_hourly.segment IS 'Caller''s label; empty without one';
COMMENT ON COLUMN acceptance_hourly.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN acceptance_hourly.drafter IS 'Name of the drafter; empty for vanilla';
COMMENT ON COLUMN acceptance_hourly.draft_revision IS 'Revision of the drafter; empty for vanilla';
COMMENT ON COLUMN acceptance_hourly.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN acceptance_hourly.sampling_bucket IS 'Sampling settings that share a history';
COMMENT ON COLUMN acceptance_hourly.prompt_bucket IS 'Prompt lengths that share a history';
COMMENT ON COLUMN acceptance_hourly.form_bucket IS
    'What the text has to match (json, regex, choice, grammar), then tools, images; empty for plain text';
COMMENT ON COLUMN acceptance_hourly.purpose IS 'traffic, probe or control';
COMMENT ON COLUMN acceptance_hourly.mode IS
    'vanilla, speculative, or shadow: a drafter''s counts on texts that it did not decode';
COMMENT ON COLUMN acceptance_hourly.num_draft_tokens IS 'k; 0 is vanilla';
COMMENT ON COLUMN acceptance_hourly.num_jobs IS 'Jobs';
COMMENT ON COLUMN acceptance_hourly.num_cut IS 'Of the jobs, texts that a limit ended; shadows have none';
COMMENT ON COLUMN acceptance_hourly.rounds IS 'Rounds, prefills among them';
COMMENT ON COLUMN acceptance_hourly.num_empty_rounds IS 'Rounds without a proposal';
COMMENT ON COLUMN acceptance_hourly.num_cropped IS 'rounds + accepted + forced - tokens';
COMMENT ON COLUMN acceptance_hourly.num_forced IS
    'Tokens that were the only ones allowed at their place; they are taken without a trial';
COMMENT ON COLUMN acceptance_hourly.num_prompt_tokens IS 'Tokens of prompts';
COMMENT ON COLUMN acceptance_hourly.num_tokens IS 'Tokens generated';
COMMENT ON COLUMN acceptance_hourly.rounds_sq IS 'Sum over jobs of rounds², for the variance over jobs';
COMMENT ON COLUMN acceptance_hourly.tokens_sq IS 'Sum over jobs of tokens²';
COMMENT ON COLUMN acceptance_hourly.rounds_tokens IS 'Sum over jobs of rounds · tokens';
COMMENT ON COLUMN acceptance_hourly.proposed IS 'Rounds in which at least this many tokens were proposed';
COMMENT ON COLUMN acceptance_hourly.trials IS 'Rounds in which this position was tested';
COMMENT ON COLUMN acceptance_hourly.accepts IS 'Of the trials, accepted';
COMMENT ON COLUMN acceptance_hourly.trials_sq IS 'Sum over jobs of trials²';
COMMENT ON COLUMN acceptance_hourly.accepts_sq IS 'Sum over jobs of accepts²';
COMMENT ON COLUMN acceptance_hourly.accepts_trials IS 'Sum over jobs of accepts · trials';
COMMENT ON COLUMN acceptance_hourly.wall_s IS 'Seconds of decoding';
COMMENT ON COLUMN acceptance_hourly.device_s IS 'Engine seconds';

CREATE TABLE acceptance_daily (
    LIKE acceptance_hourly INCLUDING DEFAULTS INCLUDING COMMENTS,
    CONSTRAINT pk_acceptance_daily PRIMARY KEY (bucket, task, segment, target_revision, drafter, draft_revision,
        engine, sampling_bucket, prompt_bucket, purpose, mode, num_draft_tokens, form_bucket)
);
CREATE INDEX ix_acceptance_daily_task_bucket ON acceptance_daily (task, bucket);
COMMENT ON TABLE acceptance_daily IS
    'Counts and sums of decode_runs by day, and those of shadows in evidence_rows: never rates';
COMMENT ON COLUMN acceptance_daily.bucket IS 'Start of the day, UTC';

CREATE TABLE acceptance_state (
    task TEXT NOT NULL DEFAULT '',
    segment TEXT NOT NULL DEFAULT '',
    target_revision TEXT NOT NULL DEFAULT '',
    drafter TEXT NOT NULL DEFAULT '',
    draft_revision TEXT NOT NULL DEFAULT '',
    engine TEXT NOT NULL DEFAULT '',
    sampling_bucket TEXT NOT NULL DEFAULT '',
    prompt_bucket TEXT NOT NULL DEFAULT '',
    form_bucket TEXT NOT NULL DEFAULT '',
    as_of timestamptz NOT NULL,
    num_jobs BIGINT NOT NULL,
    evidence BYTEA NOT NULL,
    last_ledger_id BIGINT NOT NULL,
    changed_in BIGINT NOT NULL,
        CONSTRAINT pk_acceptance_state PRIMARY KEY (target_revision, engine, drafter, draft_revision, task, segment,
        sampling_bucket, prompt_bucket, form_bucket)
) WITH (toast_tuple_target = 8160, fillfactor = 50);
ALTER TABLE acceptance_state ALTER COLUMN evidence SET STORAGE EXTERNAL;
CREATE INDEX ix_acceptance_state_changed_in ON acceptance_state USING brin (changed_in) WITH (pages_per_range = 4, autosummarize = true);
COMMENT ON TABLE acceptance_state IS
    'Sums over the jobs of an evidence key, which fade: what a task''s next decision rests on';
COMMENT ON COLUMN acceptance_state.task IS 'Kind of prompt';
COMMENT ON COLUMN acceptance_state.segment IS 'Caller''s label; empty without one';
COMMENT ON COLUMN acceptance_state.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN acceptance_state.drafter IS 'Name of the drafter; empty for vanilla';
COMMENT ON COLUMN acceptance_state.draft_revision IS 'Revision of the drafter; empty for vanilla';
COMMENT ON COLUMN acceptance_state.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN acceptance_state.sampling_bucket IS 'Sampling settings that share a history';
COMMENT ON COLUMN acceptance_state.prompt_bucket IS 'Prompt lengths that share a history';
COMMENT ON COLUMN acceptance_state.form_bucket IS
    'What the text has to match (json, regex, choice, grammar), then tools, images; empty for plain text';
COMMENT ON COLUMN acceptance_state.as_of IS
    'When the last of its jobs ended. The weights of the sums hold at this moment';
COMMENT ON COLUMN acceptance_state.num_jobs IS 'Jobs ever added';
COMMENT ON COLUMN acceptance_state.evidence IS
    'alphaloop.deciding.evidence.KeyEvidence, packed: the view evidence_now unpacks it';
COMMENT ON COLUMN acceptance_state.last_ledger_id IS 'The last row of the ledger that was added';
COMMENT ON COLUMN acceptance_state.changed_in IS 'Transaction that changed the row last; readers ask for newer ones';

CREATE TABLE remembered_results (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    task TEXT NOT NULL,
    segment TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    job_id TEXT NOT NULL,
    batch_id TEXT,
    num_tokens INTEGER NOT NULL,
    token_ids BYTEA,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    forgotten_at timestamptz,
    changed_in BIGINT NOT NULL DEFAULT pg_current_xact_id()::text::bigint,
    CONSTRAINT pk_remembered_results PRIMARY KEY (id),
    CONSTRAINT ck_remembered_results_forgotten CHECK ((token_ids IS NULL) = (forgotten_at IS NOT NULL))
);
CREATE INDEX ix_remembered_results_target_revision_task ON remembered_results (target_revision, task, id);
CREATE INDEX ix_remembered_results_changed_in ON remembered_results (changed_in);
CREATE INDEX ix_remembered_results_job_id ON remembered_results (job_id);
CREATE INDEX ix_remembered_results_recorded_at ON remembered_results (recorded_at) WHERE forgotten_at IS NULL;
COMMENT ON TABLE remembered_results IS
    'One row a result that look-up searches: the texts of tasks whose memory is on, never prompts';
COMMENT ON COLUMN remembered_results.id IS 'Order in which they were recorded, nearly';
COMMENT ON COLUMN remembered_results.task IS 'Task of the job';
COMMENT ON COLUMN remembered_results.segment IS 'Segment of the job; empty without';
COMMENT ON COLUMN remembered_results.target_revision IS
    'Hash of weights, config and tokenizer of the model whose tokens they are';
COMMENT ON COLUMN remembered_results.job_id IS 'Job whose result it is';
COMMENT ON COLUMN remembered_results.batch_id IS 'Batch of the job; null without';
COMMENT ON COLUMN remembered_results.num_tokens IS 'Tokens of the text, also after it is forgotten';
COMMENT ON COLUMN remembered_results.token_ids IS
    'The text: ids of 4 bytes, low byte first, compressed with zlib; null when forgotten';
COMMENT ON COLUMN remembered_results.recorded_at IS 'When the outcome was recorded';
COMMENT ON COLUMN remembered_results.forgotten_at IS
    'When it was erased, or had to make room; null: look-up searches it';
COMMENT ON COLUMN remembered_results.changed_in IS 'Transaction that wrote or forgot it: workers read what changed';
