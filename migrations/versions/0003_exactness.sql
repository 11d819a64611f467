-- The watch over exactness: the tokens of probes and controls, and the incidents found.

CREATE TABLE probe_texts (
    job_id TEXT NOT NULL,
    decoded_at TIMESTAMP WITH TIME ZONE NOT NULL,
    token_ids INTEGER[] NOT NULL,
    finish_reason TEXT NOT NULL,
    max_tokens INTEGER NOT NULL,
    second_ids INTEGER[] NOT NULL,
    gaps REAL[] NOT NULL,
    near_tie DOUBLE PRECISION NOT NULL,
    CONSTRAINT pk_probe_texts PRIMARY KEY (job_id)
);
CREATE INDEX ix_probe_texts_decoded_at ON probe_texts (decoded_at);
COMMENT ON TABLE probe_texts IS
    'What a probe and its control generated, to be compared; never the tokens of traffic';
COMMENT ON COLUMN probe_texts.job_id IS 'The probe or control';
COMMENT ON COLUMN probe_texts.decoded_at IS 'When its last token was decoded';
COMMENT ON COLUMN probe_texts.token_ids IS 'The tokens of its text';
COMMENT ON COLUMN probe_texts.finish_reason IS 'stop or length';
COMMENT ON COLUMN probe_texts.max_tokens IS 'Most tokens that were asked for';
COMMENT ON COLUMN probe_texts.second_ids IS 'By token, the target''s second choice; empty: unknown';
COMMENT ON COLUMN probe_texts.gaps IS 'By token, how far the second choice''s logit lies behind';
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
    opened_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    acknowledged_at TIMESTAMP WITH TIME ZONE,
    acknowledged_by TEXT,
    note TEXT,
    closed_at TIMESTAMP WITH TIME ZONE,
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
COMMENT ON COLUMN incidents.acknowledged_at IS 'When somebody took note of it';
COMMENT ON COLUMN incidents.acknowledged_by IS 'Who took note of it';
COMMENT ON COLUMN incidents.note IS 'What they do about it';
COMMENT ON COLUMN incidents.closed_at IS 'When later probes were right; null while open';
