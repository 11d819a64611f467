-- What runs on this schema: which code may, which scheduler leads, what workers do, and which servers decode.

CREATE TABLE code_revisions (
    revision TEXT NOT NULL,
    CONSTRAINT pk_code_revisions PRIMARY KEY (revision)
);
COMMENT ON TABLE code_revisions IS
    'Which releases can run on the schema as it is now; the oldest of them is the oldest code that can';
COMMENT ON COLUMN code_revisions.revision IS 'The newest schema revision that such a release knows';

CREATE TABLE leader_terms (
    role TEXT NOT NULL,
    term BIGINT NOT NULL,
    began_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_leader_terms PRIMARY KEY (role)
);
COMMENT ON TABLE leader_terms IS
    'Who leads now, by number: a leader of an earlier term can write nothing any more';
COMMENT ON COLUMN leader_terms.role IS 'What is led: scheduler';
COMMENT ON COLUMN leader_terms.term IS 'Number of the leader, from 1';
COMMENT ON COLUMN leader_terms.began_at IS 'When it began to lead';

CREATE TABLE leader_leases (
    role TEXT NOT NULL,
    owner TEXT NOT NULL,
    expires_at TIMESTAMP WITH TIME ZONE NOT NULL,
    CONSTRAINT pk_leader_leases PRIMARY KEY (role)
);
COMMENT ON TABLE leader_leases IS
    'Who leads, and until when';
COMMENT ON COLUMN leader_leases.role IS 'What is led: scheduler';
COMMENT ON COLUMN leader_leases.owner IS 'Process that leads';
COMMENT ON COLUMN leader_leases.expires_at IS 'When another may lead, unless it is renewed';

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
    started_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    seen_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    target_revision TEXT,
    setup JSON,
    sampling_defaults TEXT DEFAULT '' NOT NULL,
    CONSTRAINT pk_workers PRIMARY KEY (owner)
)
WITH (fillfactor = 50);
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
    first_seen_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    last_seen_at TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
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
COMMENT ON COLUMN server_identities.changed IS
    'What is other than in the row before, in words; null in the first row';
COMMENT ON COLUMN server_identities.identity IS
    'alphaloop.server_identity.ServerIdentity: names, answers to prompts';
