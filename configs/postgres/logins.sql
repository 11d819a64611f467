-- One login for each process and one for people, each with the rights of its group role, and one for the console, which
-- reads what workers write and acts as the scheduler may; run again, it sets the passwords anew. `alphaloop migrate` makes the group roles before. Passwords come from the environment, so that no
-- list of processes shows them.

\getenv worker_password WORKER_DB_PASSWORD
\getenv scheduler_password SCHEDULER_DB_PASSWORD
\getenv reader_password READER_DB_PASSWORD
\getenv console_password CONSOLE_DB_PASSWORD

-- Where statements are logged, these are not, because they hold the passwords. A managed server may not allow this; if
-- it logs statements (log_statement is ddl or all), they are in its log.
SELECT has_parameter_privilege('log_statement', 'SET')
   AND has_parameter_privilege('log_min_error_statement', 'SET') AS may_hide \gset
\if :may_hide
SET log_statement = 'none';
SET log_min_error_statement = 'panic';
\endif
SET client_min_messages = 'warning';

SELECT format('CREATE ROLE %I', login) FROM (VALUES ('worker'), ('scheduler'), ('reader'), ('console')) AS logins (login)
WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = login) \gexec

ALTER ROLE worker LOGIN PASSWORD :'worker_password';
ALTER ROLE scheduler LOGIN PASSWORD :'scheduler_password';
ALTER ROLE reader LOGIN PASSWORD :'reader_password';
ALTER ROLE console LOGIN PASSWORD :'console_password';

GRANT alphaloop_worker TO worker;
GRANT alphaloop_scheduler TO scheduler;
GRANT alphaloop_reader TO reader;
GRANT alphaloop_worker, alphaloop_scheduler TO console;
