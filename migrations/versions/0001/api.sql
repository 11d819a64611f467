-- Keys, files and batches of OpenAI's API, and the audit of who did what.

CREATE TABLE api_keys (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    name TEXT NOT NULL,
    prefix TEXT NOT NULL,
    digest BYTEA NOT NULL,
    segment TEXT NOT NULL,
    tasks TEXT[] NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz,
    last_used_at timestamptz,
    revoked_at timestamptz,
    CONSTRAINT pk_api_keys PRIMARY KEY (id)
);
CREATE UNIQUE INDEX uq_api_keys_digest ON api_keys (digest);
CREATE UNIQUE INDEX uq_api_keys_not_revoked ON api_keys (name) WHERE revoked_at IS NULL;
COMMENT ON TABLE api_keys IS 'One row a key of the API for files and batches';
COMMENT ON COLUMN api_keys.id IS 'Order in which they were made';
COMMENT ON COLUMN api_keys.name IS 'Owner of files and batches; a new key of this name takes them over';
COMMENT ON COLUMN api_keys.prefix IS 'First characters of the key, to tell it by';
COMMENT ON COLUMN api_keys.digest IS 'SHA-256 of the key, which itself is not stored';
COMMENT ON COLUMN api_keys.segment IS 'Segment of every job that is sent with it';
COMMENT ON COLUMN api_keys.tasks IS 'Tasks that it may send jobs to; empty: all';
COMMENT ON COLUMN api_keys.created_at IS 'When it was made';
COMMENT ON COLUMN api_keys.expires_at IS 'From when on it is refused; null: never';
COMMENT ON COLUMN api_keys.last_used_at IS 'When it was used last, to a minute';
COMMENT ON COLUMN api_keys.revoked_at IS 'When it was revoked; from then on it is refused';

CREATE TABLE api_files (
    id TEXT NOT NULL,
    key_name TEXT NOT NULL,
    filename TEXT NOT NULL,
    purpose TEXT NOT NULL,
    num_bytes BIGINT NOT NULL,
    parts JSON NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    CONSTRAINT pk_api_files PRIMARY KEY (id),
    CONSTRAINT ck_api_files_purpose CHECK (purpose IN ('batch','batch_output'))
);
CREATE INDEX ix_api_files_key_name_created_at ON api_files (key_name, created_at, id);
CREATE INDEX ix_api_files_expires_at ON api_files (expires_at);
COMMENT ON TABLE api_files IS 'One row a file of the API';
COMMENT ON COLUMN api_files.id IS 'As the API names it';
COMMENT ON COLUMN api_files.key_name IS 'Name of the key that it belongs to';
COMMENT ON COLUMN api_files.filename IS 'On the machine that it came from';
COMMENT ON COLUMN api_files.purpose IS 'batch: uploaded; batch_output: written by a batch';
COMMENT ON COLUMN api_files.num_bytes IS 'Its length';
COMMENT ON COLUMN api_files.parts IS
    'Where its content lies: references into the claim-check store; null: a file of the data folder';
COMMENT ON COLUMN api_files.created_at IS 'When it was uploaded or written';
COMMENT ON COLUMN api_files.expires_at IS 'When it is deleted';

CREATE TABLE api_batches (
    id TEXT NOT NULL,
    key_name TEXT NOT NULL,
    segment TEXT NOT NULL,
    task TEXT,
    tasks TEXT[] NOT NULL,
    endpoint TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    metadata JSON NOT NULL,
    input_file_id TEXT NOT NULL,
    output_file_id TEXT,
    error_file_id TEXT,
    status TEXT NOT NULL,
    errors JSON NOT NULL,
    num_total INTEGER NOT NULL DEFAULT 0,
    num_sent INTEGER NOT NULL DEFAULT 0,
    num_invalid INTEGER NOT NULL DEFAULT 0,
    num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0,
    by_status JSON NOT NULL DEFAULT '{}',
    used JSON,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    expires_at timestamptz NOT NULL,
    look_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    in_progress_at timestamptz,
    finalizing_at timestamptz,
    completed_at timestamptz,
    failed_at timestamptz,
    expired_at timestamptz,
    cancelling_at timestamptz,
    cancelled_at timestamptz,
    output_kept_s INTEGER,
    CONSTRAINT pk_api_batches PRIMARY KEY (id),
        CONSTRAINT ck_api_batches_status CHECK (status IN
        ('validating','failed','in_progress','finalizing','completed','expired','cancelling','cancelled'))
);
CREATE INDEX ix_api_batches_key_name_created_at ON api_batches (key_name, created_at, id);
CREATE INDEX ix_api_batches_input_file_id ON api_batches (input_file_id);
CREATE INDEX ix_api_batches_open ON api_batches (look_at)
    WHERE status IN ('validating','in_progress','finalizing','cancelling');
CREATE INDEX ix_api_batches_created_at ON api_batches (created_at, id);
COMMENT ON TABLE api_batches IS 'One row a batch of the API';
COMMENT ON COLUMN api_batches.id IS 'As the API names it; batch_id of its jobs';
COMMENT ON COLUMN api_batches.key_name IS 'Name of the key that it belongs to';
COMMENT ON COLUMN api_batches.segment IS 'Segment of its jobs';
COMMENT ON COLUMN api_batches.task IS 'Task of lines that name none; null: each has to name one';
COMMENT ON COLUMN api_batches.tasks IS 'Tasks that lines may name; empty: all';
COMMENT ON COLUMN api_batches.endpoint IS 'What all lines must ask for';
COMMENT ON COLUMN api_batches.completion_window IS 'As it was asked for';
COMMENT ON COLUMN api_batches.metadata IS 'The caller''s own; null without';
COMMENT ON COLUMN api_batches.input_file_id IS 'File with its requests';
COMMENT ON COLUMN api_batches.output_file_id IS
    'File with the requests that have a text; null before the end, and without any';
COMMENT ON COLUMN api_batches.error_file_id IS 'File with the other requests; null before the end, and without any';
COMMENT ON COLUMN api_batches.status IS 'OpenAI''s word for where it stands';
COMMENT ON COLUMN api_batches.errors IS 'Why it failed; null if it did not';
COMMENT ON COLUMN api_batches.num_total IS 'Lines with text';
COMMENT ON COLUMN api_batches.num_sent IS 'Lines that Kafka has or that were wrong: who goes on begins after them';
COMMENT ON COLUMN api_batches.num_invalid IS 'Of these, how many were wrong and not sent';
COMMENT ON COLUMN api_batches.num_completed IS 'Requests with a text, when it was looked at last';
COMMENT ON COLUMN api_batches.num_failed IS 'Requests that ended without one';
COMMENT ON COLUMN api_batches.by_status IS
    'Its requests by what became of them, when they were counted last; a request that was sent again counts once';
COMMENT ON COLUMN api_batches.used IS 'Tokens of its texts: input, output, reasoning; null until it has ended';
COMMENT ON COLUMN api_batches.created_at IS 'When it was asked for';
COMMENT ON COLUMN api_batches.expires_at IS 'Deadline of its jobs';
COMMENT ON COLUMN api_batches.look_at IS 'When a scheduler looks at it next';
COMMENT ON COLUMN api_batches.in_progress_at IS 'When its lines were counted';
COMMENT ON COLUMN api_batches.finalizing_at IS 'When its files began to be written';
COMMENT ON COLUMN api_batches.completed_at IS 'When it completed';
COMMENT ON COLUMN api_batches.failed_at IS 'When it failed as a whole';
COMMENT ON COLUMN api_batches.expired_at IS 'When it was found over before all of it was done';
COMMENT ON COLUMN api_batches.cancelling_at IS 'When its cancellation was asked for';
COMMENT ON COLUMN api_batches.cancelled_at IS 'When it was cancelled';
COMMENT ON COLUMN api_batches.output_kept_s IS 'Seconds for which its files are kept; null: as long as any other';

CREATE TABLE audit (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    at timestamptz NOT NULL DEFAULT clock_timestamp(),
    by_kind TEXT NOT NULL,
    by TEXT NOT NULL,
    action TEXT NOT NULL,
    subject TEXT NOT NULL,
    address TEXT,
    CONSTRAINT pk_audit PRIMARY KEY (id),
    CONSTRAINT ck_audit_by_kind CHECK (by_kind IN ('login','key','command'))
);
CREATE INDEX ix_audit_at ON audit (at);
COMMENT ON TABLE audit IS 'One row an action of a person or a program on the console, its API or its keys';
COMMENT ON COLUMN audit.id IS 'Order of the actions';
COMMENT ON COLUMN audit.at IS 'When it was done';
COMMENT ON COLUMN audit.by_kind IS 'login of the console, key of the API, or command';
COMMENT ON COLUMN audit.by IS 'Name of the login, of the key, or of the account that typed the command';
COMMENT ON COLUMN audit.action IS 'What was done, in one word';
COMMENT ON COLUMN audit.subject IS 'To what: an id, a name, or a choice of dead letters';
COMMENT ON COLUMN audit.address IS
    'Where the request came from: the last proxy''s address behind one; null of a command';
