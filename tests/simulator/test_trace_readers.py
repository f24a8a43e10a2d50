"""Readers of traces: what they yield, and the line number in an error."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_simulator.traces import (
    InvalidTrace,
    TraceRequest,
    read_azure,
    read_burstgpt,
    read_mooncake,
    read_trace,
    unshared,
    write_mooncake,
)

GOOD = {"timestamp": 3, "input_length": 1025, "output_length": 7, "hash_ids": [0, 1, 2]}


def lines(*records) -> str:
    return "\n".join(r if isinstance(r, str) else json.dumps(GOOD | r) for r in records) + "\n"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace"


def test_mooncake_trace_is_read(path):
    path.write_text(lines({}, "", {"timestamp": 3.5, "hash_ids": [0, 1, 9]}))
    first, second = read_trace(path)
    assert first == TraceRequest(3, 1025, 7, (0, 1, 2))
    assert second == TraceRequest(3.5, 1025, 7, (0, 1, 9))


def test_mooncake_trace_with_another_block_size(path):
    path.write_text(lines({"input_length": 48}))
    assert next(read_mooncake(path, block_size=16)).hash_ids == (0, 1, 2)


@pytest.mark.parametrize(
    "bad, message",
    [
        ("{", "must be a JSON object: Expecting property name enclosed in double quotes at column"),
        ('  {"timestamp": 1,, 2}', "must be a JSON object: "),
        ("[1]", "must be a JSON object, got list"),
        ({"timestamp": 2}, "timestamp must not be below 3, got 2"),
        ({"timestamp": "4"}, "timestamp must be a number of at least 0, got '4'"),
        ({"timestamp": float("nan")}, "timestamp must be a number of at least 0, got nan"),
        ({"timestamp": -1}, "timestamp must be a number of at least 0, got -1"),
        ({"input_length": 0}, "input_length must be an integer of at least 1, got 0"),
        ({"input_length": True}, "input_length must be an integer of at least 1, got True"),
        ({"output_length": -1}, "output_length must be an integer of at least 0, got -1"),
        ({"output_length": None}, "output_length must be an integer of at least 0, got None"),
        ({"hash_ids": None}, "hash_ids must be a list of integers"),
        ({"hash_ids": [0, 1, "2"]}, "hash_ids must be a list of integers"),
        ({"hash_ids": [0, 1, -2]}, "hash_ids must be a list of integers"),
        ({"hash_ids": [0, 1]}, "hash_ids must be 3 for 1025 tokens in blocks of 512, got 2"),
        ({"input_length": 1024}, "hash_ids must be 2 for 1024 tokens in blocks of 512, got 3"),
        ({"hash_ids": [0, 2, 1]}, "hash id 2 must follow hash id 1 as before, got hash id 0"),
        ({"hash_ids": [1, 3, 4]}, "hash id 1 must follow hash id 0 as before, got nothing"),
        ({"hash_ids": [0, 1, 1]}, "hash id 1 must follow hash id 0 as before, got hash id 1"),
    ],
)
def test_bad_line_of_a_mooncake_trace_is_reported(path, bad, message):
    path.write_text(lines({}, "", bad, {}))
    with pytest.raises(InvalidTrace) as error:
        read_trace(path)
    assert error.value.line == 3 and error.value.source == str(path)
    assert str(error.value).startswith(f"{path}, line 3: {message}")
    assert str(error.value).removeprefix(str(path)).count("line") == 1, "which of the two?"


def test_prefix_check_is_optional(path):
    path.write_text(lines({}, {"hash_ids": [2, 1, 0]}))
    assert len(list(read_mooncake(path, check_prefixes=False))) == 2


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.mark.parametrize("before", ["\ufeff", "\n", " \r\n\n", "\ufeff\r\n"])
@pytest.mark.parametrize(
    "text",
    [lines({}), AZURE + "2023-11-16 18:00:00,1025,7\n", BURST + "5,m,1025,7,1032,l\n"],
    ids=["mooncake", "azure", "burstgpt"],
)
def test_byte_order_mark_and_blank_lines_are_skipped(path, before, text):
    path.write_bytes((before + text).encode())
    (request,) = read_trace(path)
    assert (request.input_length, request.output_length) == (1025, 7)


@pytest.mark.parametrize("text", ["", "\n", "\ufeff \n"])
def test_empty_trace_is_reported_as_empty(path, text):
    path.write_bytes(text.encode())
    with pytest.raises(InvalidTrace, match="line 1: a trace must hold at least one request"):
        read_trace(path)


def test_azure_traces_of_2023_and_2024_are_read(path):
    path.write_text(
        AZURE
        + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
        + "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 02:00:01+02:00,1,0\n"
    )
    requests = read_trace(path)
    assert [(r.input_length, r.output_length) for r in requests] == [
        (374, 44),
        (396, 109),
        (2162, 5),
        (1, 0),
    ]
    times = [r.timestamp_ms for r in requests]
    assert times[:2] == [0, pytest.approx(4314.579)]
    assert times[3] - times[2] == pytest.approx(990.07)
    assert all(r.hash_ids == () for r in requests)


def test_burstgpt_failures_are_skipped(path):
    path.write_text(
        BURST
        + "5,ChatGPT,472,18,490,Conversation log\n45,ChatGPT,0,0,0,API log\n"
        + "118.5,GPT-4,417,276,693,API log\n"
    )
    assert read_trace(path) == [TraceRequest(0, 472, 18), TraceRequest(113_500, 417, 276)]


@pytest.mark.parametrize(
    "text",
    [
        "Timestamp,Request tokens,Response tokens\n5,472,18\n",  # without totals
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens\n"
        "5,abc,1.5,ChatGPT,472,18,490\n",
    ],
)
def test_other_columns_of_burstgpt_are_read(path, text):
    path.write_text(text)
    assert list(read_burstgpt(path)) == [TraceRequest(0, 472, 18)]


@pytest.mark.parametrize(
    "reader, text, line, message",
    [
        (read_azure, "", 1, "header must have 'TIMESTAMP'"),
        (read_azure, "\nTIMESTAMP,a,b\n", 2, "header must have 'ContextTokens'"),
        (read_azure, AZURE + "x,1,2\n", 2, "TIMESTAMP must be a time, got 'x'"),
        (read_azure, AZURE + "2023-11-16 18:00:00.x,1,2\n", 2, "TIMESTAMP must be a time"),
        (read_azure, AZURE + "2023-11-16 18:00:00,1\n", 2, "must have 3 fields, got 2"),
        (
            read_azure,
            AZURE + "2023-11-16 18:00:01,1,1\n\n2023-11-16 18:00:00,1,1\n",
            4,
            "TIMESTAMP must not be before the line above, got '2023-11-16 18:00:00'",
        ),
        (read_azure, AZURE + "2023-11-16 18:00:00,1.5,1\n", 2, "ContextTokens must be an integer"),
        (read_azure, AZURE + "2023-11-16 18:00:00,0,1\n", 2, "ContextTokens must be at least 1"),
        (read_burstgpt, BURST + "1,m,5,-1,4,l\n", 2, "Response tokens must be an integer of at"),
        (read_burstgpt, BURST + "nan,m,5,1,6,l\n", 2, "Timestamp must be a time, got 'nan'"),
        (
            read_burstgpt,
            BURST + "1,m,5,1,6,l\n2,m,0,0,9,l\n3,m,5,1,7,l\n",
            4,
            "Total tokens must be 6, the sum of both, got 7",
        ),
        (read_burstgpt, BURST + "1,m,5,1,x,l\n", 2, "Total tokens must be an integer of at least"),
        (read_burstgpt, BURST + "1,m,5,1\n", 2, "must have 6 fields, got 4"),
        (read_trace, "what,is,this\n", 1, "must be a JSON object (Mooncake), or a header with"),
        (read_trace, "\n\nwhat\n", 3, "must be a JSON object (Mooncake), or a header with"),
        (read_azure, AZURE + ",,\n", 2, "TIMESTAMP must be a time, got ''"),
        (read_trace, AZURE, 1, "a trace must hold at least one request"),
    ],
)
def test_bad_table_is_reported(path, reader, text, line, message):
    path.write_text(text)
    with pytest.raises(InvalidTrace) as error:
        list(reader(path))
    assert error.value.line == line
    assert f"line {line}: {message}" in str(error.value)


@given(
    st.sampled_from(["", AZURE, BURST, lines({})]),
    st.one_of(
        st.binary(max_size=60),
        st.text('0123456789-:. ,+Z\n"{}[]', max_size=80).map(str.encode),
        st.sampled_from([b"[" * 100_000, b'"' + b"x" * 200_000, b"9" * 5000 + b",1,1,1,1,1"]),
    ),
)
@settings(max_examples=200, deadline=None)
def test_any_bytes_give_a_trace_or_invalid_trace(tmp_path_factory, head, tail):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(head.encode() + tail)
    try:
        requests = read_trace(path)
    except InvalidTrace:
        return
    assert requests and all(request.input_length >= 1 for request in requests)


requests_of_any_length = st.lists(
    st.builds(
        TraceRequest,
        st.one_of(st.integers(0, 10**7), st.floats(0, 1e7, width=32)),
        st.integers(1, 5000),
        st.integers(0, 2000),
    ),
    min_size=1,
    max_size=20,
)


@given(requests_of_any_length)
@settings(max_examples=50, deadline=None)
def test_written_trace_round_trips(tmp_path_factory, requests):
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    requests = sorted(unshared(requests), key=lambda r: r.timestamp_ms)
    write_mooncake(requests, path)
    assert read_trace(path) == requests
    ids = [hash_id for request in requests for hash_id in request.hash_ids]
    assert len(ids) == len(set(ids)) == sum(-(-r.input_length // 512) for r in requests)
