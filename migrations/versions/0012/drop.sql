-- Everything that spending.sql makes, in the other order.

DROP FUNCTION grant_to_roles();
ALTER FUNCTION grant_tables_of_0011() RENAME TO grant_to_roles;
COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';
DROP VIEW job_spending;
ALTER TABLE decode_runs DROP COLUMN target, DROP COLUMN batch_id;
COMMENT ON COLUMN decode_runs.device_s IS 'Share of the engine''s seconds: each step''s divided by its batch';
