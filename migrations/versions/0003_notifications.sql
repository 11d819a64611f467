-- Which notifications were sent where.

CREATE TABLE notification_sinks (
    name TEXT NOT NULL,
    known_since TIMESTAMP WITH TIME ZONE DEFAULT now() NOT NULL,
    CONSTRAINT pk_notification_sinks PRIMARY KEY (name)
);
COMMENT ON TABLE notification_sinks IS
    'The addresses that get notifications';
COMMENT ON COLUMN notification_sinks.name IS 'Service, and a hash of the address';
COMMENT ON COLUMN notification_sinks.known_since IS 'When it was configured first; nothing older is sent to it';

CREATE TABLE notifications (
    sink TEXT NOT NULL,
    kind TEXT NOT NULL,
    source_id BIGINT NOT NULL,
    num_attempts INTEGER NOT NULL,
    attempted_at TIMESTAMP WITH TIME ZONE NOT NULL,
    sent_at TIMESTAMP WITH TIME ZONE,
    failure TEXT,
    CONSTRAINT pk_notifications PRIMARY KEY (sink, kind, source_id),
    CONSTRAINT fk_notifications_sink_notification_sinks FOREIGN KEY (sink) REFERENCES notification_sinks (name) ON DELETE CASCADE,
    CONSTRAINT ck_notifications_kind CHECK (kind IN ('drift','incident_opened','incident_closed','report')),
    CONSTRAINT ck_notifications_num_attempts CHECK (num_attempts > 0)
);
COMMENT ON TABLE notifications IS
    'Attempts to tell people; what has no row was not tried yet';
COMMENT ON COLUMN notifications.sink IS 'Where it is sent';
COMMENT ON COLUMN notifications.kind IS 'drift, incident_opened, incident_closed or report';
COMMENT ON COLUMN notifications.source_id IS 'id in drift_event_states, incidents or reports';
COMMENT ON COLUMN notifications.num_attempts IS 'Times that sending was begun';
COMMENT ON COLUMN notifications.attempted_at IS 'When it was begun last';
COMMENT ON COLUMN notifications.sent_at IS 'When the service took it; null before';
COMMENT ON COLUMN notifications.failure IS 'Why the last attempt failed; null before, and where the process died in it';
