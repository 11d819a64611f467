-- Partitions made and dropped by their owner for those who may not change the schema, and the group roles.

CREATE FUNCTION make_partitions(days date[]) RETURNS date[] LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    missing record;
    partition text;
    made date[] := '{}';
BEGIN
    -- Two processes must not make the same partition at once.
    PERFORM pg_advisory_xact_lock(1634494561);
    FOR missing IN
        SELECT day, parent.relname AS parent FROM unnest(days) AS day, pg_class AS parent
        WHERE parent.relkind = 'p' AND parent.relnamespace = current_schema()::regnamespace
            AND NOT EXISTS (
                SELECT FROM pg_class AS known WHERE known.relnamespace = parent.relnamespace
                    AND known.relname = parent.relname || '_' || to_char(day, 'YYYYMMDD')
            )
        ORDER BY day, parent.relname
    LOOP
        partition := missing.parent || '_' || to_char(missing.day, 'YYYYMMDD');
        -- Built as a table and then attached, so that readers and writers do not wait, as they would for PARTITION OF.
        EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL)', partition, missing.parent);
        EXECUTE format(
            'ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
            missing.parent, partition, missing.day || ' 00:00+00', missing.day + 1 || ' 00:00+00'
        );
        made := made || missing.day;
    END LOOP;
    RETURN ARRAY(SELECT DISTINCT unnest(made) ORDER BY 1);
END
$$;

COMMENT ON FUNCTION make_partitions(date[]) IS
    'Makes the daily partitions of these days that are missing; returns the days that were made';

CREATE FUNCTION drop_partitions(before date) RETURNS date[] LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    old record;
    dropped date[] := '{}';
BEGIN
    FOR old IN
        SELECT child.relname, right(child.relname, 8)::date AS day
        FROM pg_inherits AS i
            JOIN pg_class AS child ON child.oid = i.inhrelid JOIN pg_class AS parent ON parent.oid = i.inhparent
        WHERE parent.relkind = 'p' AND parent.relnamespace = current_schema()::regnamespace
            AND right(child.relname, 8)::date < before
        ORDER BY parent.relname, day
    LOOP
        EXECUTE format('DROP TABLE %I', old.relname);
        dropped := dropped || old.day;
    END LOOP;
    RETURN ARRAY(SELECT DISTINCT unnest(dropped) ORDER BY 1);
END
$$;

COMMENT ON FUNCTION drop_partitions(date) IS
    'Drops the daily partitions of the days before this one, rows and all; returns those days';

-- Whoever calls them cannot put other tables in the way.
DO $$
BEGIN
    EXECUTE format('ALTER FUNCTION make_partitions(date[]) SET search_path = %I, pg_temp', current_schema());
    EXECUTE format('ALTER FUNCTION drop_partitions(date) SET search_path = %I, pg_temp', current_schema());
END
$$;

REVOKE EXECUTE ON FUNCTION make_partitions(date[]), drop_partitions(date) FROM PUBLIC;

CREATE FUNCTION grant_to_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
    role text;
    roles text[] := '{alphaloop_worker,alphaloop_scheduler,alphaloop_reader}';
BEGIN
    FOREACH role IN ARRAY roles LOOP
        IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
            BEGIN
                EXECUTE format('CREATE ROLE %I NOLOGIN', role);
            EXCEPTION
                WHEN insufficient_privilege OR duplicate_object OR unique_violation THEN NULL;
            END;
        END IF;
    END LOOP;
    IF (SELECT count(*) FROM pg_roles WHERE rolname = ANY (roles)) = 3 THEN
        EXECUTE format('GRANT USAGE ON SCHEMA %I TO alphaloop_worker, alphaloop_scheduler, alphaloop_reader',
            current_schema());
        GRANT SELECT ON alembic_version, code_revisions, installation
            TO alphaloop_worker, alphaloop_scheduler, alphaloop_reader;
        GRANT SELECT ON evidence_now, task_alpha_now, task_jobs_now, task_speedup_now, expectation_now, decision_log,
            failed_jobs, open_drift TO alphaloop_worker, alphaloop_reader;
        GRANT UPDATE (kafka_cluster, kafka_prefix, noted_at) ON installation TO alphaloop_worker, alphaloop_scheduler;
        GRANT EXECUTE ON FUNCTION make_partitions(date[]) TO alphaloop_worker, alphaloop_scheduler;

        -- Whoever submits a batch notes it with the rights of a worker; a scheduler counts it.
        GRANT SELECT, INSERT, UPDATE, DELETE ON jobs, outbox, cancellations, cost_profiles, workers, task_speedups
            TO alphaloop_worker;
        GRANT SELECT, INSERT, UPDATE ON batches, acceptance_hourly, acceptance_state, exploration_budgets,
            draft_revisions, server_identities, remembered_results TO alphaloop_worker;
        GRANT SELECT, INSERT ON stored_texts, decode_runs, evidence_rows, switchback_slices, expectation_pairs,
            probe_texts, decision_snapshots, decisions TO alphaloop_worker;
        GRANT SELECT ON acceptance_daily, drift_events, probe_sets, probe_runs TO alphaloop_worker;
        GRANT USAGE ON SEQUENCE ledger_ids TO alphaloop_worker;

        -- Without the texts of jobs: the scheduler deletes them unread. Locking a row needs the right to update a
        -- column. It makes no keys.
        GRANT SELECT (job_id, task, segment, custom_id, batch_id, purpose, status, attempt, num_crashes, num_failures,
            owner, lease_expires_at, created_at, finished_at), UPDATE (lease_expires_at), DELETE
            ON jobs TO alphaloop_scheduler;
        GRANT SELECT (id, task, segment, target_revision, job_id, batch_id, num_tokens, recorded_at, forgotten_at,
            changed_in), UPDATE, DELETE ON remembered_results TO alphaloop_scheduler;
        GRANT SELECT, INSERT, UPDATE, DELETE ON cancellations, redrives, batches, acceptance_hourly, acceptance_daily,
            acceptance_state, decisions, probe_runs, probe_texts, task_speedups, expectation_pairs, incidents,
            drift_events, drift_event_states, drift_memories, drift_positions, draft_revisions, schedule_runs, reports,
            notification_sinks, notifications, leader_terms, leader_leases, api_files, api_batches
            TO alphaloop_scheduler;
        GRANT SELECT, DELETE ON stored_texts TO alphaloop_scheduler;
        GRANT SELECT, INSERT, UPDATE (id), DELETE ON audit TO alphaloop_scheduler;
        GRANT SELECT, UPDATE (last_used_at) ON api_keys TO alphaloop_scheduler;
        GRANT SELECT ON outbox, decode_runs, evidence_rows, switchback_slices, probe_sets, probe_prompts,
            cost_profiles, workers, server_identities TO alphaloop_scheduler;
        GRANT EXECUTE ON FUNCTION drop_partitions(date) TO alphaloop_scheduler;

        -- Tables without texts of callers, and of the others the columns without; no digest of a key.
        GRANT SELECT ON outbox, batches, decode_runs, evidence_rows, acceptance_hourly, acceptance_daily,
            acceptance_state, cost_profiles, decisions, exploration_budgets, probe_sets, probe_runs, incidents,
            drift_events, drift_event_states, drift_memories, drift_positions, draft_revisions, schedule_runs, reports,
            notification_sinks, notifications, switchback_slices, task_speedups, expectation_pairs, workers,
            server_identities, audit TO alphaloop_reader;
        GRANT SELECT (job_id, task, segment, custom_id, batch_id, purpose, status, attempt, num_crashes, num_failures,
            owner, lease_expires_at, created_at, finished_at) ON jobs TO alphaloop_reader;
        GRANT SELECT (id, task, segment, target_revision, job_id, batch_id, num_tokens, recorded_at, forgotten_at,
            changed_in) ON remembered_results TO alphaloop_reader;
        GRANT SELECT (id, name, prefix, segment, tasks, created_at, expires_at, last_used_at, revoked_at)
            ON api_keys TO alphaloop_reader;
        GRANT SELECT (id, key_name, purpose, num_bytes, created_at, expires_at) ON api_files TO alphaloop_reader;
        GRANT SELECT (id, key_name, segment, task, endpoint, completion_window, input_file_id, output_file_id,
            error_file_id, status, num_total, num_sent, num_invalid, num_completed, num_failed, by_status, used,
            output_kept_s, created_at, expires_at, look_at, in_progress_at, finalizing_at, completed_at, failed_at,
            expired_at, cancelling_at, cancelled_at) ON api_batches TO alphaloop_reader;
    END IF;
    RETURN ARRAY(SELECT name FROM unnest(roles) AS name WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name));
END
$$;

COMMENT ON FUNCTION grant_to_roles() IS
    'Makes the group roles, if the caller may, and grants them their rights; returns the roles that are missing';

SELECT grant_to_roles();
