from __future__ import annotations

import pytest

from alphaloop.messages.headers import encoded, encoded_result_headers, result_headers


@pytest.mark.parametrize("carried", [{}, {"traceparent": "00-1", "ce_causationid": "é"}])
def test_a_result_is_sent_with_its_headers(carried: dict[str, str]) -> None:
    sent = encoded_result_headers(b"job-1", carried)
    assert sorted(sent) == sorted(encoded(result_headers("job-1", carried)))
