-- Everything that reuse.sql makes, in the other order.

DROP FUNCTION grant_to_roles();
ALTER FUNCTION grant_tables_of_0013() RENAME TO grant_to_roles;
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
DROP TABLE reused_results, reusable_results;
