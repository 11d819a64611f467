-- Functions on counts by position, and the one that unpacks acceptance_state.
-- Bodies in standard SQL are bound to what they name when they are created: no search_path can change their meaning,
-- and a dump restores them before the constraints that use them.

-- array_sum and array_ge check every row of the ledger, array_add sums up every query's rows. PL/pgSQL calls them in a
-- quarter of the time: a body in standard SQL that reads a set starts a query at each call. They name pg_catalog, so no
-- search_path can change them either.

CREATE FUNCTION array_sum(counts bigint[]) RETURNS bigint
    LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    DECLARE
        total bigint := 0;
        number bigint;
    BEGIN
        FOREACH number IN ARRAY counts LOOP
            total := total OPERATOR(pg_catalog.+) coalesce(number, 0);
        END LOOP;
        RETURN total;
    END $$;
COMMENT ON FUNCTION array_sum(bigint[]) IS 'Sum of the elements; 0 for an empty array';

CREATE FUNCTION array_ge(a bigint[], b bigint[]) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    BEGIN
        IF pg_catalog.cardinality(a) OPERATOR(pg_catalog.<>) pg_catalog.cardinality(b) THEN
            RETURN false;
        END IF;
        FOR i IN 1 .. pg_catalog.cardinality(a) LOOP
            IF a[i] OPERATOR(pg_catalog.<) b[i] THEN
                RETURN false;
            END IF;
        END LOOP;
        RETURN true;
    END $$;
COMMENT ON FUNCTION array_ge(bigint[], bigint[]) IS
    'Whether both are as long and no element of a is below its fellow in b';

CREATE FUNCTION array_add(a bigint[], b bigint[]) RETURNS bigint[]
    LANGUAGE plpgsql IMMUTABLE STRICT PARALLEL SAFE
    AS $$
    BEGIN
        FOR i IN 1 .. pg_catalog.cardinality(b) LOOP
            a[i] := coalesce(a[i], 0) OPERATOR(pg_catalog.+) coalesce(b[i], 0);
        END LOOP;
        RETURN a;
    END $$;
COMMENT ON FUNCTION array_add(bigint[], bigint[]) IS 'Sum position by position, as long as the longer of the two';

CREATE AGGREGATE sum_by_position(bigint[]) (
    SFUNC = array_add, STYPE = bigint[], INITCOND = '{}', COMBINEFUNC = array_add, PARALLEL = SAFE
);
COMMENT ON AGGREGATE sum_by_position(bigint[]) IS 'Sum of counts position by position; empty without rows';

-- Sums are never negative, so the sign bit of a double is 0, and its bits are a bigint's.
CREATE FUNCTION unpack_doubles(packed bytea) RETURNS float8[]
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN ARRAY(
        SELECT CASE WHEN bits < 4503599627370496 THEN 0::float8 ELSE
            (1 + (bits & 4503599627370495)::float8 / 4503599627370496::float8)
                * power(2::float8, ((bits >> 52) - 1023)::float8) END
        FROM generate_series(0, length(packed) / 8 - 1) AS n,
            LATERAL (SELECT ('x' || encode(substring(packed FROM 8 * n + 1 FOR 8), 'hex'))::bit(64)::bigint AS bits)
        ORDER BY n
    );
COMMENT ON FUNCTION unpack_doubles(bytea) IS 'Numbers that are not negative, packed as big-endian doubles';
