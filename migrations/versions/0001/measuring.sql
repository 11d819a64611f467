-- What is measured again and when: probes, the watch over exactness, drift and drafts.

CREATE TABLE probe_sets (
    task TEXT NOT NULL,
    version TEXT NOT NULL,
    num_draft_tokens INTEGER NOT NULL,
    source TEXT NOT NULL,
    is_active BOOLEAN NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_probe_sets PRIMARY KEY (task, version),
    CONSTRAINT ck_probe_sets_source CHECK (source IN ('file','traffic')),
    CONSTRAINT ck_probe_sets_num_draft_tokens CHECK (num_draft_tokens > 0)
);
CREATE UNIQUE INDEX uq_probe_sets_active ON probe_sets (task) WHERE is_active;
COMMENT ON TABLE probe_sets IS 'Versions of a task''s fixed prompts, on which α is measured again';
COMMENT ON COLUMN probe_sets.task IS 'Kind of prompt';
COMMENT ON COLUMN probe_sets.version IS 'Hash of its prompts and k: a changed set is another set';
COMMENT ON COLUMN probe_sets.num_draft_tokens IS 'k of its probes, whatever k is in force';
COMMENT ON COLUMN probe_sets.source IS 'file, or traffic: drawn from jobs with the task''s consent';
COMMENT ON COLUMN probe_sets.is_active IS 'Whether it is the set in use';
COMMENT ON COLUMN probe_sets.created_at IS 'When it was registered first';

CREATE TABLE probe_prompts (
    task TEXT NOT NULL,
    version TEXT NOT NULL,
    position INTEGER NOT NULL,
    prompt_id TEXT NOT NULL,
    body JSONB NOT NULL,
    job_id TEXT,
    segment TEXT,
    CONSTRAINT pk_probe_prompts PRIMARY KEY (task, version, position),
        CONSTRAINT fk_probe_prompts_task_version_probe_sets FOREIGN KEY (task, version) REFERENCES probe_sets (task,
        version) ON DELETE CASCADE
);
COMMENT ON TABLE probe_prompts IS 'The prompts of a probe set';
COMMENT ON COLUMN probe_prompts.task IS 'Kind of prompt';
COMMENT ON COLUMN probe_prompts.version IS 'Version of the probe set';
COMMENT ON COLUMN probe_prompts.position IS 'Number of the prompt, from 0';
COMMENT ON COLUMN probe_prompts.prompt_id IS 'Hash of the body: the same prompt in another version';
COMMENT ON COLUMN probe_prompts.body IS 'Body of the probe job, in OpenAI''s form';
COMMENT ON COLUMN probe_prompts.job_id IS 'Job that it was drawn from; null where a person chose it';
COMMENT ON COLUMN probe_prompts.segment IS 'Segment of that job; null without';

CREATE TABLE probe_runs (
    job_id TEXT NOT NULL,
    schedule_id TEXT NOT NULL,
    scheduled_for timestamptz NOT NULL,
    task TEXT NOT NULL,
    probe_set TEXT NOT NULL,
    position INTEGER NOT NULL,
    prompt_id TEXT NOT NULL,
    purpose TEXT NOT NULL,
    drafter TEXT,
    num_draft_tokens INTEGER,
    scored_drafters TEXT[] NOT NULL DEFAULT '{}',
    payload_sha256 BYTEA NOT NULL,
    sent_at timestamptz,
    compared_at timestamptz,
    CONSTRAINT pk_probe_runs PRIMARY KEY (job_id)
);
CREATE INDEX ix_probe_runs_scheduled_for_task ON probe_runs (scheduled_for, task);
COMMENT ON TABLE probe_runs IS 'Every probe and control sent; joins decode_runs by job_id';
COMMENT ON COLUMN probe_runs.job_id IS 'The probe or control job';
COMMENT ON COLUMN probe_runs.schedule_id IS 'The scheduled run that sent it';
COMMENT ON COLUMN probe_runs.scheduled_for IS 'That run''s time';
COMMENT ON COLUMN probe_runs.task IS 'Kind of prompt';
COMMENT ON COLUMN probe_runs.probe_set IS 'Version of the probe set';
COMMENT ON COLUMN probe_runs.position IS 'Number of the prompt in it';
COMMENT ON COLUMN probe_runs.prompt_id IS 'Hash of the prompt''s body, by which versions are compared';
COMMENT ON COLUMN probe_runs.purpose IS 'probe or control';
COMMENT ON COLUMN probe_runs.drafter IS 'What a probe measures; null for a control';
COMMENT ON COLUMN probe_runs.num_draft_tokens IS 'k of a probe, or of what a control scores';
COMMENT ON COLUMN probe_runs.scored_drafters IS 'Drafters scored on a control''s text, without decoding it with them';
COMMENT ON COLUMN probe_runs.payload_sha256 IS 'SHA-256 of what was sent: a job with another payload is no probe';
COMMENT ON COLUMN probe_runs.sent_at IS 'When it was handed to Kafka';
COMMENT ON COLUMN probe_runs.compared_at IS 'When a probe''s text was compared with its control''s; null before';

CREATE TABLE probe_texts (
    job_id TEXT NOT NULL,
    decoded_at timestamptz NOT NULL,
    token_ids INTEGER[] NOT NULL,
    finish_reason TEXT NOT NULL,
    max_tokens INTEGER NOT NULL,
    second_ids INTEGER[] NOT NULL,
    gaps REAL[] NOT NULL,
    near_tie DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_probe_texts PRIMARY KEY (job_id)
);
CREATE INDEX ix_probe_texts_decoded_at ON probe_texts (decoded_at);
COMMENT ON TABLE probe_texts IS 'What a probe and its control generated, to be compared; never the tokens of traffic';
COMMENT ON COLUMN probe_texts.job_id IS 'The probe or control';
COMMENT ON COLUMN probe_texts.decoded_at IS 'When its last token was decoded';
COMMENT ON COLUMN probe_texts.token_ids IS 'The tokens of its text';
COMMENT ON COLUMN probe_texts.finish_reason IS 'stop or length';
COMMENT ON COLUMN probe_texts.max_tokens IS 'Most tokens that were asked for';
COMMENT ON COLUMN probe_texts.second_ids IS 'By token, the target''s second choice; empty: unknown';
COMMENT ON COLUMN probe_texts.gaps IS 'By token, how far the second choice''s logit is below the first''s';
COMMENT ON COLUMN probe_texts.near_tie IS 'Gap up to which rounding in the engine''s dtype may swap two';

CREATE TABLE incidents (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    kind TEXT NOT NULL,
    task TEXT NOT NULL,
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    engine TEXT NOT NULL,
    job_ids TEXT[] NOT NULL,
    evidence JSONB NOT NULL,
    sentence TEXT NOT NULL,
    opened_at timestamptz NOT NULL DEFAULT now(),
    acknowledged_at timestamptz,
    acknowledged_by TEXT,
    note TEXT,
    closed_at timestamptz,
    CONSTRAINT pk_incidents PRIMARY KEY (id),
    CONSTRAINT ck_incidents_kind CHECK (kind IN ('wrong_text','cut_short','wrong_counts')),
    CONSTRAINT ck_incidents_closed_after_opened CHECK (closed_at IS NULL OR closed_at >= opened_at)
);
CREATE UNIQUE INDEX uq_incidents_open ON incidents (kind, task, drafter, draft_revision, target_revision, engine)
    WHERE closed_at IS NULL;
COMMENT ON TABLE incidents IS
    'Proofs that the engine did not do what it promises: text that differs beyond a near-tie, or wrong counts';
COMMENT ON COLUMN incidents.id IS 'Order';
COMMENT ON COLUMN incidents.kind IS 'wrong_text, cut_short or wrong_counts';
COMMENT ON COLUMN incidents.task IS 'Kind of prompt';
COMMENT ON COLUMN incidents.drafter IS 'Drafter whose text is wrong; empty: the vanilla one';
COMMENT ON COLUMN incidents.draft_revision IS 'Its revision; empty for vanilla';
COMMENT ON COLUMN incidents.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN incidents.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN incidents.job_ids IS 'The jobs that show it';
COMMENT ON COLUMN incidents.evidence IS 'Where the first of them went wrong';
COMMENT ON COLUMN incidents.sentence IS 'One sentence for the owner';
COMMENT ON COLUMN incidents.opened_at IS 'When it was found';
COMMENT ON COLUMN incidents.acknowledged_at IS 'When a person took note of it';
COMMENT ON COLUMN incidents.acknowledged_by IS 'Who took note of it';
COMMENT ON COLUMN incidents.note IS 'What they do about it';
COMMENT ON COLUMN incidents.closed_at IS 'When later probes were right; null while open';

CREATE TABLE drift_events (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    task TEXT NOT NULL,
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    cause TEXT NOT NULL,
    verdict TEXT NOT NULL,
    action TEXT NOT NULL,
    evidence JSONB NOT NULL,
    lost_tokens_per_s DOUBLE PRECISION,
    began_after timestamptz,
    began_before timestamptz,
    opened_at timestamptz NOT NULL DEFAULT now(),
    raised_at timestamptz NOT NULL DEFAULT now(),
    confirmed_at timestamptz,
    acknowledged_at timestamptz,
    acknowledged_by TEXT,
    note TEXT,
    closed_at timestamptz,
    closed_because TEXT,
    accepted_at timestamptz,
    num_reopened INTEGER NOT NULL DEFAULT 0,
    CONSTRAINT pk_drift_events PRIMARY KEY (id),
    CONSTRAINT ck_drift_events_closed_after_opened CHECK (closed_at IS NULL OR closed_at >= opened_at),
    CONSTRAINT ck_drift_events_closed_with_reason CHECK ((closed_at IS NULL) = (closed_because IS NULL)),
    CONSTRAINT ck_drift_events_accepted_is_closed CHECK (accepted_at IS NULL OR closed_at IS NOT NULL),
        CONSTRAINT ck_drift_events_cause CHECK (cause IN
        ('traffic_changed','mix_shift','draft_stale','bad_draft','setup_changed','fault','too_little_evidence'))
);
CREATE UNIQUE INDEX uq_drift_events_open ON drift_events (task, drafter, cause) WHERE closed_at IS NULL;
COMMENT ON TABLE drift_events IS 'Drift found, its cause, what it costs, and when it was over';
COMMENT ON COLUMN drift_events.id IS 'Order';
COMMENT ON COLUMN drift_events.task IS 'Kind of prompt';
COMMENT ON COLUMN drift_events.drafter IS 'Drafter whose acceptance moved';
COMMENT ON COLUMN drift_events.draft_revision IS 'Its revision';
COMMENT ON COLUMN drift_events.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN drift_events.cause IS 'One of the seven causes of docs/concepts/drift.md';
COMMENT ON COLUMN drift_events.verdict IS 'What was found, in sentences for the owner';
COMMENT ON COLUMN drift_events.action IS 'What the owner may do';
COMMENT ON COLUMN drift_events.evidence IS 'Counts, intervals and times, of traffic and of probes';
COMMENT ON COLUMN drift_events.lost_tokens_per_s IS 'What it costs to do nothing; null where that is not known';
COMMENT ON COLUMN drift_events.began_after IS 'The change lies between this moment';
COMMENT ON COLUMN drift_events.began_before IS 'and this one';
COMMENT ON COLUMN drift_events.opened_at IS 'When it was found';
COMMENT ON COLUMN drift_events.raised_at IS 'When it was found last: opened or reopened';
COMMENT ON COLUMN drift_events.confirmed_at IS 'When later evidence agreed; null before';
COMMENT ON COLUMN drift_events.acknowledged_at IS 'When a person took note of it; null before';
COMMENT ON COLUMN drift_events.acknowledged_by IS 'Who did';
COMMENT ON COLUMN drift_events.note IS 'What they said';
COMMENT ON COLUMN drift_events.closed_at IS 'When it was over; null while open';
COMMENT ON COLUMN drift_events.closed_because IS 'The evidence that it was over, or that its level was accepted';
COMMENT ON COLUMN drift_events.accepted_at IS 'When its owner took the new level for the norm; null otherwise';
COMMENT ON COLUMN drift_events.num_reopened IS 'Times that it came back';

CREATE TABLE drift_event_states (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    event_id BIGINT NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    state TEXT NOT NULL,
    cause TEXT NOT NULL,
    sentence TEXT NOT NULL,
    actor TEXT NOT NULL,
    evidence JSONB,
    CONSTRAINT pk_drift_event_states PRIMARY KEY (id),
        CONSTRAINT fk_drift_event_states_event_id_drift_events FOREIGN KEY(event_id) REFERENCES drift_events (id) ON
        DELETE CASCADE,
        CONSTRAINT ck_drift_event_states_state CHECK (state IN
        ('opened','explained','confirmed','acknowledged','closed','reopened'))
);
CREATE INDEX ix_drift_event_states_event_id ON drift_event_states (event_id);
COMMENT ON TABLE drift_event_states IS 'What became of every drift event: a row each time its state changed';
COMMENT ON COLUMN drift_event_states.id IS 'Order';
COMMENT ON COLUMN drift_event_states.event_id IS 'The event that it is about';
COMMENT ON COLUMN drift_event_states.at IS 'When';
COMMENT ON COLUMN drift_event_states.state IS 'opened, explained, confirmed, acknowledged, closed or reopened';
COMMENT ON COLUMN drift_event_states.cause IS 'Its cause from then on';
COMMENT ON COLUMN drift_event_states.sentence IS 'What was found, or said, then';
COMMENT ON COLUMN drift_event_states.actor IS 'Who acknowledged it; scheduler otherwise';
COMMENT ON COLUMN drift_event_states.evidence IS 'The evidence of that moment; null of an acknowledgement';

CREATE TABLE drift_positions (
    task TEXT NOT NULL,
    decoded_at timestamptz NOT NULL,
    ledger_id BIGINT NOT NULL,
    CONSTRAINT pk_drift_positions PRIMARY KEY (task)
);
COMMENT ON TABLE drift_positions IS 'How far the drift test has read, by task';
COMMENT ON COLUMN drift_positions.task IS 'Kind of prompt';
COMMENT ON COLUMN drift_positions.decoded_at IS
    'The last job that the drift test has read of this task: when it was decoded';
COMMENT ON COLUMN drift_positions.ledger_id IS 'And its place among jobs of the same moment';

CREATE TABLE drift_memories (
    task TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    engine TEXT NOT NULL,
    sampling_bucket TEXT NOT NULL,
    form_bucket TEXT NOT NULL DEFAULT '',
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    version INTEGER NOT NULL,
    document JSONB NOT NULL,
    last_decoded_at timestamptz NOT NULL,
    norm_since timestamptz,
        CONSTRAINT pk_drift_memories PRIMARY KEY (task, target_revision, engine, sampling_bucket, drafter,
        draft_revision, form_bucket)
);
COMMENT ON TABLE drift_memories IS 'What the drift test remembers of a stream, so that a run reads only new jobs';
COMMENT ON COLUMN drift_memories.task IS 'Kind of prompt';
COMMENT ON COLUMN drift_memories.target_revision IS 'Hash of the target''s weights';
COMMENT ON COLUMN drift_memories.engine IS 'Decoding library, version and dtype';
COMMENT ON COLUMN drift_memories.sampling_bucket IS 'Sampling settings that share a history';
COMMENT ON COLUMN drift_memories.form_bucket IS
    'What the text has to match (json, regex, choice, grammar), then tools, images; empty for plain text';
COMMENT ON COLUMN drift_memories.drafter IS 'Name of the drafter';
COMMENT ON COLUMN drift_memories.draft_revision IS 'Its revision';
COMMENT ON COLUMN drift_memories.version IS 'Form of `document`; another one is learned anew';
COMMENT ON COLUMN drift_memories.document IS 'Reference, running sums and windows: scheduler.drift.memory';
COMMENT ON COLUMN drift_memories.last_decoded_at IS 'When the stream''s last job was decoded';
COMMENT ON COLUMN drift_memories.norm_since IS
    'When its level was accepted: jobs from before are forgotten; null otherwise';

CREATE TABLE draft_revisions (
    drafter TEXT NOT NULL,
    draft_revision TEXT NOT NULL,
    target_revision TEXT NOT NULL,
    parent_revision TEXT,
    trained_on TEXT,
    figures JSONB,
    is_scorable BOOLEAN NOT NULL DEFAULT false,
    status TEXT NOT NULL,
    status_reason TEXT NOT NULL DEFAULT '',
    registered_at timestamptz NOT NULL DEFAULT now(),
    status_changed_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_draft_revisions PRIMARY KEY (drafter, draft_revision, target_revision),
    CONSTRAINT ck_draft_revisions_status CHECK (status IN ('candidate','active','stale','retired'))
);
COMMENT ON TABLE draft_revisions IS 'Drafts and whether they are fit to serve';
COMMENT ON COLUMN draft_revisions.drafter IS 'Name of the drafter';
COMMENT ON COLUMN draft_revisions.draft_revision IS 'Its revision';
COMMENT ON COLUMN draft_revisions.target_revision IS 'The target it drafts for';
COMMENT ON COLUMN draft_revisions.parent_revision IS 'Draft revision that it was trained to follow; null for the first of its name';
COMMENT ON COLUMN draft_revisions.trained_on IS 'What it was trained on';
COMMENT ON COLUMN draft_revisions.figures IS 'What it was measured to do on held-out text; null if never judged';
COMMENT ON COLUMN draft_revisions.is_scorable IS 'Whether one pass over a greedy text gives the counts of decoding it';
COMMENT ON COLUMN draft_revisions.status IS 'candidate, active, stale or retired';
COMMENT ON COLUMN draft_revisions.status_reason IS 'Why it has this status';
COMMENT ON COLUMN draft_revisions.registered_at IS 'When it was first seen';
COMMENT ON COLUMN draft_revisions.status_changed_at IS 'When it got this status';
