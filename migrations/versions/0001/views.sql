-- Views for people, which compute rates where they are shown, and the notice that drafts or drift changed.

CREATE VIEW task_alpha_now AS
SELECT
    task,
    drafter,
    draft_revision,
    sampling_bucket,
    form_bucket,
    target_revision,
    engine,
    purpose,
    sum(num_jobs)::bigint AS num_jobs,
    array_sum(sum_by_position(trials)) AS trials,
    array_sum(sum_by_position(accepts)) AS accepts,
    array_sum(sum_by_position(accepts))::float8 / nullif(array_sum(sum_by_position(trials)), 0) AS alpha,
    (sum_by_position(accepts))[1]::float8 / nullif((sum_by_position(trials))[1], 0) AS alpha_1,
    min(num_draft_tokens) AS min_num_draft_tokens,
    max(num_draft_tokens) AS max_num_draft_tokens
FROM acceptance_hourly
WHERE mode = 'speculative' AND bucket >= date_trunc('hour', now() - interval '24 hours', 'UTC')
GROUP BY task, drafter, draft_revision, sampling_bucket, form_bucket, target_revision, engine, purpose;
COMMENT ON VIEW task_alpha_now IS
    'Acceptance over the last 24 hours, to the full hour: a row for jobs that may be compared with each other';
COMMENT ON COLUMN task_alpha_now.task IS 'Kind of prompt';
COMMENT ON COLUMN task_alpha_now.drafter IS 'Drafter that decoded';
COMMENT ON COLUMN task_alpha_now.draft_revision IS 'Its revision';
COMMENT ON COLUMN task_alpha_now.sampling_bucket IS 'Sampling settings';
COMMENT ON COLUMN task_alpha_now.form_bucket IS 'What the text had to match, tools, images; empty for plain text';
COMMENT ON COLUMN task_alpha_now.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN task_alpha_now.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN task_alpha_now.purpose IS 'traffic, or probe: fixed prompts at a fixed k';
COMMENT ON COLUMN task_alpha_now.num_jobs IS 'Jobs decoded speculatively';
COMMENT ON COLUMN task_alpha_now.trials IS 'Draft tokens tested';
COMMENT ON COLUMN task_alpha_now.accepts IS 'Of the trials, accepted';
COMMENT ON COLUMN task_alpha_now.alpha IS 'accepts / trials over all positions; falls as k grows, so read it with k';
COMMENT ON COLUMN task_alpha_now.alpha_1 IS 'Acceptance of the first drafted token; does not move with k';
COMMENT ON COLUMN task_alpha_now.min_num_draft_tokens IS 'Smallest k used';
COMMENT ON COLUMN task_alpha_now.max_num_draft_tokens IS 'Largest k used';

CREATE VIEW task_jobs_now AS
SELECT task, purpose, status, count(*) AS num_jobs, min(created_at) AS first_claimed_at, max(created_at) AS last_claimed_at
FROM jobs
WHERE created_at >= date_trunc('hour', now() - interval '24 hours', 'UTC')
GROUP BY task, purpose, status;
COMMENT ON VIEW task_jobs_now IS
    'Jobs that workers claimed first in the last 24 hours, to the full hour; those of traffic apart from probes and controls';
COMMENT ON COLUMN task_jobs_now.task IS 'Kind of prompt';
COMMENT ON COLUMN task_jobs_now.purpose IS 'traffic, probe or control';
COMMENT ON COLUMN task_jobs_now.status IS 'running, then one of succeeded, failed, expired, cancelled';
COMMENT ON COLUMN task_jobs_now.num_jobs IS 'How many';
COMMENT ON COLUMN task_jobs_now.first_claimed_at IS 'When the first of them was claimed';
COMMENT ON COLUMN task_jobs_now.last_claimed_at IS 'When the last of them was claimed';

CREATE VIEW task_speedup_now AS
SELECT DISTINCT ON (task)
    task,
    drafter,
    draft_revision,
    min_num_draft_tokens,
    max_num_draft_tokens,
    mean_running,
    mean_context,
    num_tokens / nullif(sequence_s, 0) AS tokens_per_s,
    num_tokens / nullif(sequence_s, 0) / speedup AS vanilla_tokens_per_s,
    speedup,
    speedup_low,
    speedup_high,
    verdict,
    num_blocks,
    num_control_rounds,
    control_share,
    num_tokens,
    sequence_s,
    covers_from,
    covers_to,
    computed_at,
    sampling_bucket,
    target_revision,
    engine,
    host,
    device
FROM task_speedups
WHERE covers_to >= now() - interval '24 hours'
ORDER BY task, num_tokens DESC, sampling_bucket COLLATE "C", target_revision COLLATE "C", engine COLLATE "C",
    host COLLATE "C", device COLLATE "C", drafter COLLATE "C", draft_revision COLLATE "C";
COMMENT ON VIEW task_speedup_now IS
    'The measured speed-up of each task, from its switchback slices of the last 24 hours';
COMMENT ON COLUMN task_speedup_now.task IS 'Kind of prompt';
COMMENT ON COLUMN task_speedup_now.drafter IS 'Drafter that decoded most of the task''s speculated text';
COMMENT ON COLUMN task_speedup_now.draft_revision IS 'Its revision';
COMMENT ON COLUMN task_speedup_now.min_num_draft_tokens IS 'Smallest k that was used';
COMMENT ON COLUMN task_speedup_now.max_num_draft_tokens IS 'Largest k that was used';
COMMENT ON COLUMN task_speedup_now.mean_running IS 'Load: mean number of sequences of all tasks in a round';
COMMENT ON COLUMN task_speedup_now.mean_context IS 'Mean tokens of context of a sequence';
COMMENT ON COLUMN task_speedup_now.tokens_per_s IS 'Tokens a second of one running sequence, as the task is decoded';
COMMENT ON COLUMN task_speedup_now.vanilla_tokens_per_s IS 'The same on a device that does not speculate: tokens_per_s over speedup; null before speedup was measured';
COMMENT ON COLUMN task_speedup_now.speedup IS 'How many times faster the task''s texts come than from a device that does not speculate; null before there are eight blocks';
COMMENT ON COLUMN task_speedup_now.speedup_low IS 'Lower 95 % bound';
COMMENT ON COLUMN task_speedup_now.speedup_high IS 'Upper 95 % bound';
COMMENT ON COLUMN task_speedup_now.verdict IS 'faster, slower, no_difference or no_verdict_yet';
COMMENT ON COLUMN task_speedup_now.num_blocks IS 'Blocks: control slices with treatment before and after';
COMMENT ON COLUMN task_speedup_now.num_control_rounds IS 'Vanilla rounds in the blocks';
COMMENT ON COLUMN task_speedup_now.control_share IS 'Of seconds times sequences, those in control slices';
COMMENT ON COLUMN task_speedup_now.num_tokens IS 'Tokens that the treatment put out';
COMMENT ON COLUMN task_speedup_now.sequence_s IS 'Seconds times sequences that these tokens took';
COMMENT ON COLUMN task_speedup_now.covers_from IS 'When the first slice began';
COMMENT ON COLUMN task_speedup_now.covers_to IS 'When the last slice began';
COMMENT ON COLUMN task_speedup_now.computed_at IS 'When it was computed';
COMMENT ON COLUMN task_speedup_now.sampling_bucket IS 'Sampling settings of the sequences';
COMMENT ON COLUMN task_speedup_now.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN task_speedup_now.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN task_speedup_now.host IS 'Machine that decoded';
COMMENT ON COLUMN task_speedup_now.device IS 'What decoded on it';

CREATE VIEW expectation_now AS
SELECT
    task,
    drafter,
    count(*) AS num_pairs,
    count(*) FILTER (WHERE speedup BETWEEN expected_low AND expected_high) AS num_held,
    exp(avg(ln(speedup / expected))) AS ratio,
    min(min_num_draft_tokens) AS min_num_draft_tokens,
    max(max_num_draft_tokens) AS max_num_draft_tokens,
    avg(mean_running) AS mean_running,
    min(covers_from) AS covers_from,
    max(covers_to) AS covers_to
FROM (
    SELECT *, row_number() OVER (PARTITION BY task, drafter ORDER BY covers_to DESC) AS age
    FROM expectation_pairs WHERE computed_at > now() - interval '7 days'
) AS pairs
WHERE age <= 32
GROUP BY task, drafter;
COMMENT ON VIEW expectation_now IS
    'Expected beside measured speed-ups of each task and drafter: its newest 32 pairs of the last 7 days';
COMMENT ON COLUMN expectation_now.task IS 'Kind of prompt';
COMMENT ON COLUMN expectation_now.drafter IS 'Drafter that was expected to be faster';
COMMENT ON COLUMN expectation_now.num_pairs IS 'Expectations that were compared with the speed-up measured over the same rounds';
COMMENT ON COLUMN expectation_now.num_held IS 'Of these, intervals that hold the measured speed-up; 95 % of them should';
COMMENT ON COLUMN expectation_now.ratio IS 'Measured over expected, geometric mean: below 1, expectations are too good';
COMMENT ON COLUMN expectation_now.min_num_draft_tokens IS 'Smallest k that was used';
COMMENT ON COLUMN expectation_now.max_num_draft_tokens IS 'Largest k that was used';
COMMENT ON COLUMN expectation_now.mean_running IS 'Load: mean number of sequences of all tasks in a round';
COMMENT ON COLUMN expectation_now.covers_from IS 'When the first slice of these pairs began';
COMMENT ON COLUMN expectation_now.covers_to IS 'When the last slice of these pairs began';

CREATE VIEW decision_log AS
SELECT
    decided_at,
    task,
    CASE WHEN from_mode IS NULL THEN NULL
         WHEN from_mode = 'vanilla' THEN 'vanilla'
         ELSE from_drafter || ' k=' || from_num_draft_tokens END AS was,
    CASE WHEN to_mode = 'vanilla' THEN 'vanilla'
         ELSE to_drafter || ' k=' || to_num_draft_tokens END AS became,
    -- As alphaloop.deciding.decision.reason_said has it: the policy expects that its choice is faster.
    CASE WHEN reason <> 'faster' THEN reason
         WHEN speedup_low <= 1 THEN 'not_surely_faster'
         ELSE 'expected_faster' END AS reason,
    explanation,
    sampling_bucket,
    batch,
    target_revision,
    device,
    owner,
    speedup,
    speedup_low,
    speedup_high,
    CASE WHEN rival_num_draft_tokens IS NULL THEN NULL
         WHEN rival_drafter IS NULL THEN 'vanilla'
         ELSE rival_drafter || ' k=' || rival_num_draft_tokens END AS rival,
    rival_speedup,
    jobs,
    ARRAY(SELECT a / nullif(n, 0) FROM unnest(accepts, trials) WITH ORDINALITY AS p(a, n, i) ORDER BY i) AS alpha
FROM decisions
-- The table also has a row where only the reason changed.
WHERE (from_mode, from_drafter, from_num_draft_tokens) IS DISTINCT FROM (to_mode, to_drafter, to_num_draft_tokens)
ORDER BY decided_at DESC, id DESC;
COMMENT ON VIEW decision_log IS
    'When a task''s choice changed, newest first';
COMMENT ON COLUMN decision_log.decided_at IS 'When';
COMMENT ON COLUMN decision_log.task IS 'Kind of prompt';
COMMENT ON COLUMN decision_log.was IS 'Choice before; null for the first';
COMMENT ON COLUMN decision_log.became IS 'Choice from then on';
COMMENT ON COLUMN decision_log.reason IS
    'alphaloop.deciding.decision.Reason; faster is shown as expected_faster, or not_surely_faster if its bounds hold 1';
COMMENT ON COLUMN decision_log.explanation IS 'The reason with its figures';
COMMENT ON COLUMN decision_log.sampling_bucket IS 'Sampling settings it applies to';
COMMENT ON COLUMN decision_log.batch IS 'Batch size it was decided at';
COMMENT ON COLUMN decision_log.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN decision_log.device IS 'Where it applies';
COMMENT ON COLUMN decision_log.owner IS 'Worker that decided';
COMMENT ON COLUMN decision_log.speedup IS 'Goodput over vanilla that was expected of the new choice';
COMMENT ON COLUMN decision_log.speedup_low IS 'Lower 95 % bound';
COMMENT ON COLUMN decision_log.speedup_high IS 'Upper 95 % bound';
COMMENT ON COLUMN decision_log.rival IS 'The best other alternative';
COMMENT ON COLUMN decision_log.rival_speedup IS 'Goodput over vanilla that was expected of the rival';
COMMENT ON COLUMN decision_log.jobs IS 'Jobs on which the choice rests, weighted by age';
COMMENT ON COLUMN decision_log.alpha IS 'By position: accepted of what was tested';

CREATE VIEW failed_jobs AS
SELECT
    finished_at, job_id, task, status, attempt, custom_id, batch_id, purpose,
    error->>'code' AS code, error->>'message' AS message, error->>'field' AS field
FROM jobs,
    -- The operators on json refuse a document that holds the character NUL anywhere, so ask first.
    LATERAL (SELECT CASE WHEN outcome::text NOT LIKE '%\\u0000%' THEN outcome->'error' END AS error) AS why
WHERE status IN ('failed', 'expired', 'cancelled')
ORDER BY finished_at DESC;
COMMENT ON VIEW failed_jobs IS
    'Jobs that failed, were too late or were cancelled, and why; newest first';
COMMENT ON COLUMN failed_jobs.finished_at IS 'When the outcome was recorded';
COMMENT ON COLUMN failed_jobs.job_id IS 'The job';
COMMENT ON COLUMN failed_jobs.task IS 'Kind of prompt';
COMMENT ON COLUMN failed_jobs.status IS 'failed, expired or cancelled';
COMMENT ON COLUMN failed_jobs.attempt IS 'The claim that ended it, from 1';
COMMENT ON COLUMN failed_jobs.custom_id IS 'The caller''s own name for the job';
COMMENT ON COLUMN failed_jobs.batch_id IS 'The caller''s group of jobs';
COMMENT ON COLUMN failed_jobs.purpose IS 'traffic, probe or control';
COMMENT ON COLUMN failed_jobs.code IS 'The error''s code: alphaloop.errors';
COMMENT ON COLUMN failed_jobs.message IS 'The error in words';
COMMENT ON COLUMN failed_jobs.field IS 'The field at fault, if one was';

CREATE VIEW open_drift AS
SELECT
    id, task, drafter, draft_revision, target_revision, cause,
    CASE
        WHEN acknowledged_at IS NOT NULL THEN 'acknowledged'
        WHEN confirmed_at IS NOT NULL THEN 'confirmed'
        WHEN num_reopened > 0 THEN 'reopened'
        ELSE 'opened'
    END AS state,
    verdict, action, lost_tokens_per_s, began_after, began_before, opened_at, now() - opened_at AS open_for,
    num_reopened, acknowledged_by, note
FROM drift_events
WHERE closed_at IS NULL
ORDER BY opened_at, id;
COMMENT ON VIEW open_drift IS
    'Drift that is not over, oldest first';
COMMENT ON COLUMN open_drift.id IS 'Number of the event';
COMMENT ON COLUMN open_drift.task IS 'Kind of prompt';
COMMENT ON COLUMN open_drift.drafter IS 'Drafter whose acceptance moved';
COMMENT ON COLUMN open_drift.draft_revision IS 'Its revision';
COMMENT ON COLUMN open_drift.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN open_drift.cause IS 'traffic_changed, mix_shift, draft_stale, bad_draft, setup_changed, fault or too_little_evidence';
COMMENT ON COLUMN open_drift.state IS 'opened, reopened, confirmed by later evidence, or acknowledged by a person';
COMMENT ON COLUMN open_drift.verdict IS 'What was found';
COMMENT ON COLUMN open_drift.action IS 'What may be done';
COMMENT ON COLUMN open_drift.lost_tokens_per_s IS 'What it costs to do nothing; null where that is not known';
COMMENT ON COLUMN open_drift.began_after IS 'The change lies between this moment';
COMMENT ON COLUMN open_drift.began_before IS 'and this one';
COMMENT ON COLUMN open_drift.opened_at IS 'When it was found first';
COMMENT ON COLUMN open_drift.open_for IS 'Since then';
COMMENT ON COLUMN open_drift.num_reopened IS 'Times that it came back';
COMMENT ON COLUMN open_drift.acknowledged_by IS 'Who has taken note of it';
COMMENT ON COLUMN open_drift.note IS 'What they said';

CREATE VIEW evidence_now AS
-- Nine sums, then seven by position, of all jobs; then the same of the recent ones.
SELECT
    task, segment, drafter, draft_revision, sampling_bucket, prompt_bucket, form_bucket, target_revision, engine, as_of,
    num_jobs,
    sums[1] AS jobs,
    sums[1 + half] AS recent_jobs,
    sums[3] AS rounds,
    sums[6] / nullif(sums[9], 0) AS mean_output_tokens,
    sums[10 + 2 * positions:9 + 3 * positions] AS trials,
    sums[10 + 3 * positions:9 + 4 * positions] AS accepts,
    sums[10 + half + 2 * positions:9 + half + 3 * positions] AS recent_trials,
    sums[10 + half + 3 * positions:9 + half + 4 * positions] AS recent_accepts
FROM acceptance_state,
    LATERAL (SELECT unpack_doubles(evidence) AS sums) AS unpacked,
    LATERAL (SELECT cardinality(sums) / 2 AS half, (cardinality(sums) / 2 - 9) / 7 AS positions) AS lengths;
COMMENT ON VIEW evidence_now IS
    'What decisions rest on: sums over the jobs of every evidence key. The older a job, the smaller its weight';
COMMENT ON COLUMN evidence_now.task IS 'Kind of prompt';
COMMENT ON COLUMN evidence_now.segment IS 'Caller''s label; empty without one';
COMMENT ON COLUMN evidence_now.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN evidence_now.drafter IS 'Name of the drafter; empty for vanilla';
COMMENT ON COLUMN evidence_now.draft_revision IS 'Revision of the drafter; empty for vanilla';
COMMENT ON COLUMN evidence_now.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN evidence_now.sampling_bucket IS 'Sampling settings that share a history';
COMMENT ON COLUMN evidence_now.prompt_bucket IS 'Prompt lengths that share a history';
COMMENT ON COLUMN evidence_now.form_bucket IS 'What the text has to match, tools, images; empty for plain text';
COMMENT ON COLUMN evidence_now.as_of IS 'When the last of its jobs ended';
COMMENT ON COLUMN evidence_now.num_jobs IS 'Jobs and probes ever added';
COMMENT ON COLUMN evidence_now.jobs IS 'Jobs and probes, weighted by their age at as_of';
COMMENT ON COLUMN evidence_now.recent_jobs IS 'Jobs of the recent window, weighted by age and by the number of later jobs: about the last two dozen';
COMMENT ON COLUMN evidence_now.rounds IS 'Weighted rounds without prefills';
COMMENT ON COLUMN evidence_now.mean_output_tokens IS 'Output tokens of the texts counted here, without forced ones, over those of them that ended by themselves: a limit cut the others; null without any';
COMMENT ON COLUMN evidence_now.trials IS 'By position: rounds in which it was tested';
COMMENT ON COLUMN evidence_now.accepts IS 'By position: of the trials, accepted';
COMMENT ON COLUMN evidence_now.recent_trials IS 'Trials of the recent window, by position';
COMMENT ON COLUMN evidence_now.recent_accepts IS 'Accepts of the recent window, by position';

CREATE FUNCTION tell_drafts_changed() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_notify('alphaloop_drafts', ''); RETURN NULL; END $$;

CREATE TRIGGER draft_revisions_changed AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF status ON draft_revisions
    FOR EACH STATEMENT EXECUTE FUNCTION tell_drafts_changed();

CREATE TRIGGER drift_events_changed AFTER INSERT OR DELETE OR TRUNCATE OR UPDATE OF closed_at ON drift_events
    FOR EACH STATEMENT EXECUTE FUNCTION tell_drafts_changed();
