-- The views over the key of evidence, with the form of jobs; those of revision 0003 are dropped before.

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
