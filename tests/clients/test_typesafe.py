"""TypeSafe's own SDK, unchanged, on POST /v1/systemone."""

import httpx2
import pytest
import typesafe_sdk
from typesafe_sdk import Choice, Image, Noul, RetryPolicy, Score, TypeSafeClient

STATE = "Customer: my invoice for March was charged twice and I would like one of the two refunded."
QUESTIONS = {
    "refund": Noul(instructions="Does the customer ask for a refund?"),
    "team": Choice(
        instructions="Which team handles this?",
        criteria={"billing": "invoices and refunds", "technical": "bugs and outages", "sales": None},
    ),
    "urgency": Score(instructions="How urgent is it?", criteria=["can wait", "this week", "today"]),
}


@pytest.fixture
def sent():
    """The requests that the SDK sends."""
    return []


@pytest.fixture
def client(server, sent):
    http = httpx2.Client(timeout=120, event_hooks={"request": [sent.append]})
    with TypeSafeClient(api_key="unused", base_url=server.url, http_client=http) as client:
        yield client


def test_one_question_of_each_type_in_one_call(client):
    response = client.system_one(state=STATE, questions=QUESTIONS)
    assert list(response.answers) == ["refund", "team", "urgency"]
    assert 0 < response.nouls["refund"].noul < 1

    team = response.choices["team"]
    assert list(team.probabilities) == ["billing", "technical", "sales"]
    assert sum(team.probabilities.values()) == pytest.approx(1)
    best = max(team.probabilities.values())
    assert team.probabilities[team.choice] == best
    assert team.confidence == pytest.approx((best - 1 / 3) / (1 - 1 / 3))

    urgency = response.scores["urgency"]
    assert urgency.legend == {0: "can wait", 1: "this week", 2: "today"}
    assert urgency.score == pytest.approx(sum(level * p for level, p in urgency.probabilities.items()))
    assert 0 <= urgency.confidence <= 1
    assert response.model == "smollm2-135m" and response.usage.input_tokens > 0


def test_a_warm_state_answers_alike_and_says_what_it_reused(client):
    state = STATE + " It is the third time this year." * 8
    cold, warm = (client.system_one(state=state, questions=QUESTIONS) for _ in range(2))
    assert warm.answers == cold.answers
    assert warm.usage.input_tokens == cold.usage.input_tokens
    reused = [
        r.raw_http_response.json()["usage"]["input_tokens_details"]["cached_tokens"] for r in (cold, warm)
    ]
    assert reused[1] > 100 > reused[0]


def test_the_state_is_counted_once_however_many_questions(client):
    state = "The weather in Riga was mild. " * 40
    ask = {f"q{i}": Noul(instructions=f"Is it about city number {i}?") for i in range(8)}
    one = client.system_one(state=state, questions={"q0": ask["q0"]}).usage.input_tokens
    eight = client.system_one(state=state, questions=ask).usage.input_tokens
    assert eight < 2 * one


def test_ids_order_and_neighbours_move_nothing(client):
    together = client.system_one(state=STATE, questions=QUESTIONS).answers
    for name, question in QUESTIONS.items():
        alone = client.system_one(state=STATE, questions={"환불? 👋": question}).answers
        assert alone["환불? 👋"] == together[name]
    backwards = client.system_one(state=STATE, questions=dict(reversed(QUESTIONS.items()))).answers
    assert backwards == together


@pytest.mark.parametrize(
    "state",
    [
        STATE,
        {"customer": {"plan": "pro", "open": 3}, "message": STATE},
        [{"role": "user", "text": STATE}, "and again", 7, None],
    ],
    ids=["string", "object", "array"],
)
def test_a_state_is_a_text_or_a_structure(client, state):
    assert client.system_one(state=state, questions=QUESTIONS).nouls["refund"].noul > 0


def test_names_come_back_as_they_were_sent(client):
    # Composed and decomposed é, a Hangul word in jamo, emoji with a joiner: equal to look at, not to compare.
    names = [
        "caf\u00e9",
        "cafe\u0301",
        "환불",
        "\u1112\u116a\u11ab",
        "👩‍💻",
        "a b\tc",
        "Straße",
        'q"u\\o',
        "x" * 300,
    ]
    response = client.system_one(
        state=STATE, questions={"한": Choice(criteria={name: None for name in names})}
    )
    assert list(response.choices["한"].probabilities) == names


def test_structured_instructions_and_criteria(client):
    questions = {
        "n": Noul(instructions={"ask": "refund?", "of": ["customer"]}, criteria={"true": {"wants": "money"}}),
        "c": Choice(instructions=["which", "team"], criteria={"a": {"does": "billing"}, "b": ["sales"]}),
        "s": Score(criteria=[{"level": "low"}, "high"]),
    }
    response = client.system_one(state=STATE, questions=questions)
    assert set(response.answers) == {"n", "c", "s"}


def test_a_large_body_comes_compressed(client, sent):
    state = "Log line: connection reset by peer on shard 7. " * 40
    response = client.system_one(state=state, questions=QUESTIONS)
    assert sent[0].headers["content-encoding"] == "zstd"
    with TypeSafeClient(
        api_key="unused", base_url=str(sent[0].url.copy_with(path="/")), compression=False, timeout=120
    ) as plain:
        assert plain.system_one(state=state, questions=QUESTIONS).answers == response.answers


def test_unknown_fields_are_ignored(client):
    plain = client.system_one(state=STATE, questions=QUESTIONS)
    extra = client.system_one(state=STATE, questions=QUESTIONS, extra_body={"seed": 7, "x_trace_id": "t"})
    assert extra.answers == plain.answers


def test_models_are_listed(client):
    models = client.models.list().models
    assert models[0].name == "smollm2-135m" and models[0].description
    assert models[0].release_date.count("-") == 2


def refused(client, error, **ask):
    """The error of a call, which must not have been tried twice."""
    with pytest.raises(error) as caught:
        client.system_one(**{"state": STATE, "questions": QUESTIONS, **ask})
    assert caught.value.request_id, "no x-typesafe-request-id"
    return caught.value


def choice_of(count: int) -> dict:
    return {"q": Choice(instructions="Which?", criteria={f"option {i}": None for i in range(count)})}


@pytest.mark.parametrize(
    "ask, loc, told",
    [
        (dict(questions=choice_of(27)), ["body", "questions", "q", "criteria"], "26"),
        (
            dict(questions={"q": Score(criteria=[str(i) for i in range(11)])}),
            ["body", "questions", "q", "criteria"],
            "10",
        ),
        (dict(questions={"q": Score(criteria=["only"])}), ["body", "questions", "q", "criteria"], "2"),
        (dict(extra_body={"questions": {}}), ["body", "questions"], "at least one"),
        (
            dict(extra_body={"questions": {"q": {"type": "boolean"}}}),
            ["body", "questions", "q", "type"],
            "noul",
        ),
        (
            dict(extra_body={"questions": {"q": {"type": "noul"}}}),
            ["body", "questions", "q", "instructions"],
            "needs",
        ),
        (dict(extra_body={"state": 7}), ["body", "state"], "number"),
        (dict(extra_body={"model": 7}), ["body", "model"], "string"),
    ],
    ids=[
        "27 options",
        "11 levels",
        "1 level",
        "no question",
        "unknown type",
        "nothing asked",
        "number",
        "bad model",
    ],
)
def test_a_mistake_is_told_with_its_place(client, sent, ask, loc, told):
    error = refused(client, typesafe_sdk.TypeSafeUnprocessableEntityError, **ask)
    assert error.body["detail"][0]["loc"] == loc
    assert told in error.body["detail"][0]["msg"] and told in str(error)
    assert len(sent) == 1, "the SDK took it for something to retry"


def test_an_unknown_model_is_an_api_usage_error(client, sent):
    error = refused(client, typesafe_sdk.TypeSafeBadRequestError, model="jev-99")
    assert error.body["detail"]["error_type"] == "api_usage_error"
    assert "jev-99" in str(error) and len(sent) == 1


def test_a_state_beyond_the_context_is_refused_with_numbers(client, sent):
    error = refused(client, typesafe_sdk.TypeSafeAPIError, state="word " * 9000)
    assert error.status in (413, 422) and error.body["detail"]["error_type"] == "max_tokens_exceeded"
    assert "8192" in str(error) and len(sent) == 1


def test_images_are_refused_in_words(client, sent):
    pixel = bytes.fromhex(
        "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
        "0000000c4944415408d763f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
    )
    error = refused(client, typesafe_sdk.TypeSafeAPIError, state=[Image(pixel)])
    assert sent[0].headers["content-type"].startswith("multipart/form-data")
    assert 400 <= error.status < 500 and "images are not supported" in str(error)
    assert len(sent) == 1


def test_keys(keyed):
    ask = dict(
        state="x", questions={"q": Noul(instructions="?")}, retry=RetryPolicy(max_retries=0), timeout=60
    )
    with TypeSafeClient(api_key="sk-two", base_url=keyed.url) as client:
        assert client.system_one(**ask).nouls
    with TypeSafeClient(api_key="sk-three", base_url=keyed.url) as client:
        with pytest.raises(typesafe_sdk.TypeSafeAuthenticationError) as error:
            client.system_one(**ask)
    assert error.value.body["detail"]["error_type"] == "authentication_error"


def test_the_short_form_is_read_where_there_are_no_questions(server):
    """No SDK writes it: a prompt and a schema."""
    schema = {"type": "choice", "options": ["billing", "sales"]}
    reply = httpx2.post(server.url + "/v1/systemone", json={"prompt": STATE, "schema": schema}, timeout=120)
    answer = reply.json()["answers"]["answer"]
    assert answer["type"] == "choice" and list(answer["probabilities"]) == ["billing", "sales"]
    assert 0 < answer["x_label_mass"] <= 1
    assert reply.headers["x-typesafe-request-id"]


def test_afterwards_nothing_is_held(server):
    server.wait_until_nothing_is_held()
