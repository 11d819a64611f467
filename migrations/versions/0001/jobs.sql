-- Claims, outcomes, what is to be published, and batches.

CREATE TABLE jobs (
    job_id TEXT NOT NULL,
    payload_sha256 BYTEA NOT NULL,
    task TEXT NOT NULL,
    segment TEXT NOT NULL DEFAULT '',
    custom_id TEXT,
    batch_id TEXT,
    purpose TEXT NOT NULL,
    status TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    num_crashes INTEGER NOT NULL DEFAULT 0,
    num_failures INTEGER NOT NULL DEFAULT 0,
    owner TEXT,
    lease_expires_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    outcome JSON,
    headers JSON,
    refused_outcome JSON,
    CONSTRAINT pk_jobs PRIMARY KEY (job_id),
    CONSTRAINT ck_jobs_outcome_when_ended CHECK ((status = 'running') = (outcome IS NULL)),
    CONSTRAINT ck_jobs_status CHECK (status IN ('running','succeeded','failed','expired','cancelled'))
) WITH (fillfactor = 15);
CREATE INDEX ix_jobs_batch_id ON jobs (batch_id) WHERE batch_id IS NOT NULL;
CREATE INDEX ix_jobs_created_at ON jobs (created_at);
CREATE INDEX ix_jobs_tried_again ON jobs (created_at) WHERE num_failures > 0;
CREATE INDEX ix_jobs_refused ON jobs (created_at) WHERE refused_outcome IS NOT NULL;
CREATE INDEX ix_jobs_finished_at ON jobs USING brin (finished_at) WITH (pages_per_range = 32, autosummarize = true);
COMMENT ON TABLE jobs IS 'One row a job: claim, then the one recorded outcome';
COMMENT ON COLUMN jobs.job_id IS 'The producer''s, or derived from where the message lies';
COMMENT ON COLUMN jobs.payload_sha256 IS 'Tells a redelivery from a conflict';
COMMENT ON COLUMN jobs.task IS 'Kind of prompt';
COMMENT ON COLUMN jobs.segment IS 'Caller''s label; empty without one';
COMMENT ON COLUMN jobs.custom_id IS 'The caller''s own name for the job';
COMMENT ON COLUMN jobs.batch_id IS 'The caller''s group of jobs';
COMMENT ON COLUMN jobs.purpose IS 'traffic, probe or control';
COMMENT ON COLUMN jobs.status IS 'running, then one of succeeded, failed, expired, cancelled';
COMMENT ON COLUMN jobs.attempt IS 'Number of the claim, from 1; only grows: the fencing token';
COMMENT ON COLUMN jobs.num_crashes IS
    'Claims that ended without an outcome and were not given back: the worker died or lost its lease';
COMMENT ON COLUMN jobs.num_failures IS 'Times that the job itself failed and was to be tried again';
COMMENT ON COLUMN jobs.owner IS 'Worker that holds the claim; null once it was given back or the job ended';
COMMENT ON COLUMN jobs.lease_expires_at IS 'When the claim may be taken over; null once the job ended';
COMMENT ON COLUMN jobs.created_at IS 'First claim';
COMMENT ON COLUMN jobs.finished_at IS 'When the outcome was recorded';
COMMENT ON COLUMN jobs.outcome IS 'The Result message, byte for byte as published';
COMMENT ON COLUMN jobs.headers IS
    'Headers that the job''s message hands on to its result; null before the outcome and without any';
COMMENT ON COLUMN jobs.refused_outcome IS
    'The Result that Kafka refused before it was published; outcome is the failure that replaced it';

CREATE TABLE outbox (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    topic TEXT NOT NULL,
    job_ids TEXT[] NOT NULL,
    owner TEXT,
    created_at timestamptz NOT NULL DEFAULT now(),
    relayed_at timestamptz,
    set_aside_at timestamptz,
    set_aside_because TEXT,
    CONSTRAINT pk_outbox PRIMARY KEY (id)
);
COMMENT ON TABLE outbox IS
    'Outcomes whose results the broker has not acknowledged yet: one row for each transaction that recorded them';
COMMENT ON COLUMN outbox.id IS 'Order of recording';
COMMENT ON COLUMN outbox.topic IS 'Where they go';
COMMENT ON COLUMN outbox.job_ids IS 'The jobs of one transaction: Kafka keys; their rows have the values';
COMMENT ON COLUMN outbox.owner IS 'Worker that recorded them and publishes them first';
COMMENT ON COLUMN outbox.created_at IS 'When they were recorded';
COMMENT ON COLUMN outbox.relayed_at IS 'When a worker last took them over to publish them';
COMMENT ON COLUMN outbox.set_aside_at IS 'When Kafka had refused them for good; null them again to publish them';
COMMENT ON COLUMN outbox.set_aside_because IS 'Why Kafka refused them';

CREATE TABLE cancellations (
    job_id TEXT NOT NULL,
    requested_at timestamptz NOT NULL DEFAULT now(),
    ends_at timestamptz NOT NULL DEFAULT now() + interval '24 hours',
    CONSTRAINT pk_cancellations PRIMARY KEY (job_id)
);
CREATE INDEX ix_cancellations_requested_at ON cancellations (requested_at);
COMMENT ON TABLE cancellations IS 'Requests from the control topic; a job that ended before is not changed';
COMMENT ON COLUMN cancellations.job_id IS 'The job to cancel, perhaps not seen yet';
COMMENT ON COLUMN cancellations.requested_at IS 'When the request was read';
COMMENT ON COLUMN cancellations.ends_at IS 'Jobs that are sent later are not cancelled';

CREATE TABLE redrives (
    topic TEXT NOT NULL,
    partition INTEGER NOT NULL,
    "offset" BIGINT NOT NULL,
    written_at_ms BIGINT NOT NULL,
    job_id TEXT NOT NULL,
    redriven_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_redrives PRIMARY KEY (topic, partition, "offset", written_at_ms)
);
COMMENT ON TABLE redrives IS 'Dead letters that `alphaloop dlq redrive` sent again';
COMMENT ON COLUMN redrives.topic IS 'Where the dead letter lies';
COMMENT ON COLUMN redrives.partition IS 'Its partition';
COMMENT ON COLUMN redrives.offset IS 'Its offset';
COMMENT ON COLUMN redrives.written_at_ms IS
    'Its timestamp in ms since 1970, because offsets begin again in a topic made anew; 0 without one';
COMMENT ON COLUMN redrives.job_id IS 'The job that it became';
COMMENT ON COLUMN redrives.redriven_at IS 'When the broker had acknowledged that job';

CREATE TABLE stored_texts (
    url TEXT NOT NULL,
    job_id TEXT NOT NULL,
    stored_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_stored_texts PRIMARY KEY (url)
);
COMMENT ON TABLE stored_texts IS 'Texts of results that were too large for Kafka; deleted after their jobs';
COMMENT ON COLUMN stored_texts.url IS 'Where the text lies: a folder or an object store';
COMMENT ON COLUMN stored_texts.job_id IS 'The job whose text it is';
COMMENT ON COLUMN stored_texts.stored_at IS 'When the result was recorded that refers to it';

CREATE TABLE batches (
    id TEXT NOT NULL,
    source TEXT NOT NULL,
    by TEXT,
    name TEXT,
    task TEXT,
    num_bytes BIGINT,
    num_total INTEGER NOT NULL DEFAULT 0,
    num_invalid INTEGER NOT NULL DEFAULT 0,
    by_status JSON NOT NULL DEFAULT '{}',
    is_open BOOLEAN NOT NULL DEFAULT true,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    counted_at timestamptz,
    CONSTRAINT pk_batches PRIMARY KEY (id),
    CONSTRAINT ck_batches_source CHECK (source IN ('command','console','kafka'))
);
CREATE INDEX ix_batches_created_at ON batches (created_at, id);
CREATE INDEX ix_batches_open ON batches (id) WHERE is_open;
COMMENT ON TABLE batches IS 'One row a batch that did not come through the API';
COMMENT ON COLUMN batches.id IS 'batch_id of its jobs';
COMMENT ON COLUMN batches.source IS
    'command: alphaloop batch submit; console: uploaded there; kafka: any other producer';
COMMENT ON COLUMN batches.by IS 'Account or login that submitted it; null of any other producer''s';
COMMENT ON COLUMN batches.name IS 'Name of its file; null without one';
COMMENT ON COLUMN batches.task IS 'Task of lines that name none; null without a file';
COMMENT ON COLUMN batches.num_bytes IS 'Length of its file; null without one';
COMMENT ON COLUMN batches.num_total IS 'Lines with text of its file; 0: not known';
COMMENT ON COLUMN batches.num_invalid IS 'Of these, how many were wrong and not sent';
COMMENT ON COLUMN batches.by_status IS
    'Its requests by what became of them, when they were counted last; a request that was sent again counts once';
COMMENT ON COLUMN batches.is_open IS 'Whether it is to be counted again';
COMMENT ON COLUMN batches.created_at IS 'When it was submitted, or a worker claimed its first job';
COMMENT ON COLUMN batches.counted_at IS 'When it was counted last';
