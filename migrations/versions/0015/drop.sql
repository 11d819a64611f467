-- Everything that lacks.sql makes, in the other order.

DROP FUNCTION grant_to_roles();
ALTER FUNCTION grant_tables_of_0014() RENAME TO grant_to_roles;
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
DELETE FROM notifications WHERE kind IN ('lack_opened','lack_closed','batch_ended');
ALTER TABLE notifications DROP CONSTRAINT ck_notifications_kind;
ALTER TABLE notifications ADD CONSTRAINT ck_notifications_kind CHECK (kind IN
    ('drift','incident_opened','incident_closed','report'));
COMMENT ON COLUMN notifications.kind IS 'drift, incident_opened, incident_closed or report';
COMMENT ON COLUMN notifications.source_id IS 'id in drift_event_states, incidents or reports';
DROP TABLE ended_batches, lacks;
