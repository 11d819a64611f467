-- Which processes run, which of them leads, what the scheduler did, reported and sent, and which code may run on this schema.

CREATE TABLE workers (
    owner TEXT NOT NULL,
    device TEXT NOT NULL,
    target TEXT NOT NULL,
    num_slots INTEGER NOT NULL,
    num_waiting INTEGER NOT NULL,
    num_held INTEGER NOT NULL,
    job_ids TEXT[] NOT NULL,
    num_tokens BIGINT[] NOT NULL,
    tokens_per_s DOUBLE PRECISION,
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at timestamptz NOT NULL DEFAULT now(),
    target_revision TEXT,
    setup JSON,
    sampling_defaults TEXT NOT NULL DEFAULT '',
    CONSTRAINT pk_workers PRIMARY KEY (owner)
) WITH (fillfactor = 50);
COMMENT ON TABLE workers IS 'What each worker is doing, as it said last';
COMMENT ON COLUMN workers.owner IS 'Process: jobs.owner of what it holds';
COMMENT ON COLUMN workers.device IS 'What decodes';
COMMENT ON COLUMN workers.target IS 'Model that it serves';
COMMENT ON COLUMN workers.num_slots IS 'Jobs that it can decode at once';
COMMENT ON COLUMN workers.num_waiting IS 'Jobs that it has taken from Kafka and does not decode yet';
COMMENT ON COLUMN workers.num_held IS 'Jobs that it has claimed and whose outcome is not recorded';
COMMENT ON COLUMN workers.job_ids IS 'Jobs that it decodes';
COMMENT ON COLUMN workers.num_tokens IS 'Tokens so far of each of job_ids';
COMMENT ON COLUMN workers.tokens_per_s IS 'Tokens a second since it said so before; null the first time';
COMMENT ON COLUMN workers.started_at IS 'When it said something first';
COMMENT ON COLUMN workers.seen_at IS 'When it said this';
COMMENT ON COLUMN workers.target_revision IS 'Hash of the target''s weights; null of an earlier release';
COMMENT ON COLUMN workers.setup IS
    'alphaloop.store.workers.WorkerSetup: engine, host, limits, drafters; null of an earlier release';
COMMENT ON COLUMN workers.sampling_defaults IS
    'What its model suggests for sampling and whether jobs take it, in words; empty: nothing';

CREATE TABLE server_identities (
    endpoint TEXT NOT NULL,
    first_seen_at timestamptz NOT NULL DEFAULT now(),
    last_seen_at timestamptz NOT NULL DEFAULT now(),
    target_revision TEXT NOT NULL,
    engine TEXT NOT NULL,
    changed TEXT,
    identity JSON NOT NULL,
    CONSTRAINT pk_server_identities PRIMARY KEY (endpoint, first_seen_at)
);
COMMENT ON TABLE server_identities IS
    'What inference servers were, by their names and by their answers to a fixed set of prompts';
COMMENT ON COLUMN server_identities.endpoint IS 'Its name in the settings';
COMMENT ON COLUMN server_identities.first_seen_at IS 'When a worker first found it so';
COMMENT ON COLUMN server_identities.last_seen_at IS 'When a worker last found it so';
COMMENT ON COLUMN server_identities.target_revision IS 'What evidence calls its model';
COMMENT ON COLUMN server_identities.engine IS 'What evidence calls the server and its arithmetic';
COMMENT ON COLUMN server_identities.changed IS 'What is other than in the row before, in words; null in the first row';
COMMENT ON COLUMN server_identities.identity IS 'alphaloop.server_identity.ServerIdentity: names, answers to prompts';

CREATE TABLE leader_terms (
    role TEXT NOT NULL,
    term BIGINT NOT NULL,
    began_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_leader_terms PRIMARY KEY (role)
);
COMMENT ON TABLE leader_terms IS 'Who leads now, by number: a leader of an earlier term can write nothing any more';
COMMENT ON COLUMN leader_terms.role IS 'What is led: scheduler';
COMMENT ON COLUMN leader_terms.term IS 'Number of the leader, from 1';
COMMENT ON COLUMN leader_terms.began_at IS 'When it began to lead';

CREATE TABLE leader_leases (
    role TEXT NOT NULL,
    owner TEXT NOT NULL,
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_leader_leases PRIMARY KEY (role)
);
COMMENT ON TABLE leader_leases IS 'Who leads, and until when';
COMMENT ON COLUMN leader_leases.role IS 'What is led: scheduler';
COMMENT ON COLUMN leader_leases.owner IS 'Process that leads';
COMMENT ON COLUMN leader_leases.expires_at IS 'When another may lead, unless it is renewed';

CREATE TABLE schedule_runs (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    schedule_id TEXT NOT NULL,
    scheduled_for timestamptz NOT NULL,
    owner TEXT NOT NULL,
    started_at timestamptz NOT NULL DEFAULT now(),
    finished_at timestamptz,
    outcome JSONB,
    CONSTRAINT pk_schedule_runs PRIMARY KEY (id),
    CONSTRAINT uq_schedule_runs_schedule_id_scheduled_for UNIQUE (schedule_id, scheduled_for)
);
COMMENT ON TABLE schedule_runs IS 'One row a due run, inserted first: the database decides that a run happens once';
COMMENT ON COLUMN schedule_runs.id IS 'Order';
COMMENT ON COLUMN schedule_runs.schedule_id IS 'What ran';
COMMENT ON COLUMN schedule_runs.scheduled_for IS 'The time it was due';
COMMENT ON COLUMN schedule_runs.owner IS 'Leader that ran it';
COMMENT ON COLUMN schedule_runs.started_at IS 'When it started';
COMMENT ON COLUMN schedule_runs.finished_at IS 'When it ended; null while running or if it died';
COMMENT ON COLUMN schedule_runs.outcome IS 'What it did, in counts; or the error';

CREATE TABLE reports (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    created_at timestamptz NOT NULL DEFAULT now(),
    covers_from timestamptz NOT NULL,
    covers_to timestamptz NOT NULL,
    summary TEXT NOT NULL,
    content JSONB NOT NULL,
    text TEXT NOT NULL,
    html TEXT NOT NULL,
    CONSTRAINT pk_reports PRIMARY KEY (id)
);
CREATE INDEX ix_reports_created_at ON reports (created_at);
COMMENT ON TABLE reports IS 'Every report that was made';
COMMENT ON COLUMN reports.id IS 'Order';
COMMENT ON COLUMN reports.created_at IS 'When';
COMMENT ON COLUMN reports.covers_from IS 'Start of what it covers';
COMMENT ON COLUMN reports.covers_to IS 'End of what it covers';
COMMENT ON COLUMN reports.summary IS 'The first line';
COMMENT ON COLUMN reports.content IS 'The report as data';
COMMENT ON COLUMN reports.text IS 'The report for a terminal';
COMMENT ON COLUMN reports.html IS 'The report as one self-contained page';

CREATE TABLE notification_sinks (
    name TEXT NOT NULL,
    known_since timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT pk_notification_sinks PRIMARY KEY (name)
);
COMMENT ON TABLE notification_sinks IS 'The addresses that get notifications';
COMMENT ON COLUMN notification_sinks.name IS 'Service, and a hash of the address';
COMMENT ON COLUMN notification_sinks.known_since IS 'When it was configured first; nothing older is sent to it';

CREATE TABLE notifications (
    sink TEXT NOT NULL,
    kind TEXT NOT NULL,
    source_id BIGINT NOT NULL,
    num_attempts INTEGER NOT NULL,
    attempted_at timestamptz NOT NULL,
    sent_at timestamptz,
    failure TEXT,
    CONSTRAINT pk_notifications PRIMARY KEY (sink, kind, source_id),
        CONSTRAINT fk_notifications_sink_notification_sinks FOREIGN KEY (sink) REFERENCES notification_sinks (name) ON
        DELETE CASCADE,
    CONSTRAINT ck_notifications_kind CHECK (kind IN ('drift','incident_opened','incident_closed','report')),
    CONSTRAINT ck_notifications_num_attempts CHECK (num_attempts > 0)
);
COMMENT ON TABLE notifications IS 'Attempts to tell people; what has no row was not tried yet';
COMMENT ON COLUMN notifications.sink IS 'Where it is sent';
COMMENT ON COLUMN notifications.kind IS 'drift, incident_opened, incident_closed or report';
COMMENT ON COLUMN notifications.source_id IS 'id in drift_event_states, incidents or reports';
COMMENT ON COLUMN notifications.num_attempts IS 'Times that sending was begun';
COMMENT ON COLUMN notifications.attempted_at IS 'When it was begun last';
COMMENT ON COLUMN notifications.sent_at IS 'When the service took it; null before';
COMMENT ON COLUMN notifications.failure IS 'Why the last attempt failed; null before, and where the process died in it';

CREATE TABLE installation (
    id UUID NOT NULL DEFAULT gen_random_uuid(),
    kafka_cluster TEXT,
    kafka_prefix TEXT,
    noted_at timestamptz,
    CONSTRAINT pk_installation PRIMARY KEY (id)
);
COMMENT ON TABLE installation IS 'One row: the Kafka that this database belongs to';
COMMENT ON COLUMN installation.id IS
    'Id of the database, in the client.id of its workers; a new one when another Kafka is adopted';
COMMENT ON COLUMN installation.kafka_cluster IS 'Id of the Kafka cluster, noted by the first process; null before';
COMMENT ON COLUMN installation.kafka_prefix IS 'kafka.prefix of its topics and groups; null before';
COMMENT ON COLUMN installation.noted_at IS 'When the two were noted or adopted; null before';
INSERT INTO installation DEFAULT VALUES;

CREATE TABLE code_revisions (
    revision TEXT NOT NULL,
    CONSTRAINT pk_code_revisions PRIMARY KEY (revision)
);
COMMENT ON TABLE code_revisions IS
    'Which releases can run on the schema as it is now; the oldest of them is the oldest code that can';
COMMENT ON COLUMN code_revisions.revision IS 'The newest schema revision that such a release knows';
INSERT INTO code_revisions VALUES ('0001');
