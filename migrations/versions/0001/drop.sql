-- Everything that the other files make, in the other order.

DROP VIEW open_drift, failed_jobs, decision_log, expectation_now, task_speedup_now, task_jobs_now, task_alpha_now,
    evidence_now;
DROP TABLE installation, batches, remembered_results, audit, api_batches, api_files, api_keys, server_identities,
    workers, leader_leases, leader_terms, code_revisions, decision_snapshots, expectation_pairs, task_speedups,
    switchback_slices, notifications, notification_sinks, incidents, probe_texts, drift_memories, drift_positions,
    reports, schedule_runs, draft_revisions, drift_event_states, drift_events, probe_runs, probe_prompts, probe_sets,
    exploration_budgets, decisions, cost_profiles, acceptance_state, acceptance_daily, acceptance_hourly,
    evidence_rows, decode_runs, stored_texts, redrives, cancellations, outbox, jobs;
DROP SEQUENCE ledger_ids;
DROP AGGREGATE sum_by_position(bigint[]);
DROP FUNCTION grant_to_roles(), drop_partitions(date), make_partitions(date[]), tell_drafts_changed(),
    unpack_doubles(bytea), array_add(bigint[], bigint[]), array_ge(bigint[], bigint[]), array_sum(bigint[]);
