-- Everything that refreshes.sql makes, in the other order.

DROP FUNCTION grant_to_roles();
ALTER FUNCTION grant_first_tables() RENAME TO grant_to_roles;
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
DELETE FROM switchback_slices WHERE against <> '';
ALTER TABLE switchback_slices DROP COLUMN against;
COMMENT ON COLUMN switchback_slices.phase IS 'control is vanilla; between, before and after are the treatment';
ALTER TABLE draft_revisions DROP COLUMN trained_for;
COMMENT ON COLUMN draft_revisions.parent_revision IS 'Revision it was trained from';
DROP TABLE rival_speedups, refresh_prompts, refreshes;
