"""OpenAI's own client, unchanged: chat, streams, completions, decisions, errors."""

import asyncio
import math

import openai
import pytest

MODEL = "smollm2-135m"
ASK = [{"role": "user", "content": "Name three rivers in Europe and say where each begins."}]


def chat(client, model=MODEL, messages=ASK, **options):
    options.setdefault("max_tokens", 24)
    options.setdefault("temperature", 0)
    return client.chat.completions.create(model=model, messages=messages, **options)


def text_of(reply) -> str:
    return reply.choices[0].message.content


# Models


def test_models_lists_the_model_the_routes_and_the_policies(client):
    names = [model.id for model in client.models.list()]
    assert names[0] == MODEL
    assert {"chain", "auto", "shell-gate", "cheap-or-strong", "scripted", "triage"} <= set(names)
    assert client.models.retrieve("auto").id == "auto"


# Chat


def test_chat_answers_in_openais_shape(client):
    reply = chat(client)
    choice = reply.choices[0]
    assert (reply.object, reply.model, choice.index) == ("chat.completion", MODEL, 0)
    assert choice.message.role == "assistant" and choice.message.content.strip()
    assert reply.id.startswith("chatcmpl-") and reply.created > 1_700_000_000
    usage = reply.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.completion_tokens <= 24 < usage.prompt_tokens


def test_a_stream_is_the_same_reply_in_pieces(client):
    whole = chat(client)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    *parts, last = chunks
    assert last.choices == [] and all(part.usage is None for part in parts)
    assert len({chunk.id for chunk in chunks}) == 1
    assert parts[0].choices[0].delta.role == "assistant"
    deltas = [part.choices[0].delta.content or "" for part in parts]
    assert "".join(deltas) == text_of(whole)
    assert sum(map(bool, deltas)) > 5, "the reply came in one piece"
    reasons = [part.choices[0].finish_reason for part in parts]
    assert reasons[-1] == whole.choices[0].finish_reason and set(reasons[:-1]) == {None}
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, field) == getattr(whole.usage, field)


def test_a_stream_carries_no_usage_unless_asked(client):
    chunks = list(chat(client, stream=True, max_tokens=3))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_the_same_prompt_again_is_found_in_the_cache(client):
    messages = [{"role": "user", "content": "The lighthouse of Genoa is old. " * 12 + "How old is it?"}]
    first, second = chat(client, messages=messages), chat(client, messages=messages)
    assert first.usage.prompt_tokens == second.usage.prompt_tokens
    cached = second.usage.prompt_tokens_details.cached_tokens
    # All but what does not fill a page of 16, and the token that the reply starts from.
    assert cached >= second.usage.prompt_tokens - 17 > first.usage.prompt_tokens_details.cached_tokens
    assert text_of(first) == text_of(second)


def test_a_seed_decides_what_sampling_draws(client):
    def draw(seed):
        return text_of(chat(client, temperature=1.3, seed=seed, max_tokens=32))

    assert draw(7) == draw(7)
    assert len({draw(seed) for seed in (1, 2, 3)}) > 1


def test_max_tokens_ends_a_reply(client):
    for field in ("max_tokens", "max_completion_tokens"):
        reply = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, **{field: 3})
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens == 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_reply_and_is_not_part_of_it(client, stream):
    whole = text_of(chat(client))
    stop = whole.split()[4][:3]
    reply = chat(client, stop=[stop, "never said at all"], stream=stream)
    if stream:
        chunks = [chunk.choices[0] for chunk in reply]
        text, reason = "".join(chunk.delta.content or "" for chunk in chunks), chunks[-1].finish_reason
    else:
        text, reason = text_of(reply), reply.choices[0].finish_reason
    assert text == whole[: whole.index(stop)]
    assert reason == "stop"


def test_logprobs_tell_what_else_was_likely(client):
    reply = chat(client, max_tokens=8, logprobs=True, top_logprobs=5)
    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == reply.usage.completion_tokens == 8
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == text_of(reply)
    for token in tokens:
        top = [entry.logprob for entry in token.top_logprobs]
        assert len(top) == 5 and top == sorted(top, reverse=True)
        # Greedy: what was taken is the likeliest.
        assert (token.token, token.logprob) == (token.top_logprobs[0].token, top[0])
        assert 0 < sum(map(math.exp, top)) <= 1 + 1e-6
    plain = chat(client, max_tokens=8)
    assert plain.choices[0].logprobs is None


def test_content_may_come_in_parts_and_from_every_role(client):
    call = {"id": "c1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "What"}, {"type": "text", "text": "time is it?"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "12:30"},
    ]
    assert text_of(chat(client, messages=messages)).strip()


def test_many_at_once_answer_as_each_does_alone(client, server):
    prompts = [[{"role": "user", "content": f"Count to {n} in words."}] for n in range(3, 9)]
    alone = [text_of(chat(client, messages=messages)) for messages in prompts]

    async def together():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as many:
            calls = [
                many.chat.completions.create(model=MODEL, messages=messages, max_tokens=24, temperature=0)
                for messages in prompts
            ]
            return [text_of(reply) for reply in await asyncio.gather(*calls)]

    assert asyncio.run(together()) == alone


def test_a_client_that_leaves_gives_its_pages_back(client, server):
    server.wait_until_nothing_is_held()
    left = server.metric("forkpoint_http_disconnected_total")
    generated = server.metric("forkpoint_engine_generated_tokens_total")
    # A text that only the bound on tokens would end.
    counting = dict(model=MODEL, prompt="1, 2, 3, 4, 5, 6, 7, 8,", max_tokens=2000, temperature=0)
    stream = client.completions.create(**counting, stream=True)
    assert next(iter(stream)).choices
    alive, pages = server.held()
    assert alive > 0 and pages > 0
    stream.close()
    server.wait_until_nothing_is_held()
    assert server.metric("forkpoint_http_disconnected_total") == left + 1
    assert server.metric("forkpoint_engine_generated_tokens_total") < generated + 1000


# Completions


def test_completions_continue_a_text(client):
    ask = dict(model=MODEL, prompt="The capital of France is", max_tokens=12, temperature=0)
    whole = client.completions.create(**ask)
    assert whole.object == "text_completion" and "Paris" in whole.choices[0].text
    assert whole.usage.completion_tokens <= 12
    stream = list(client.completions.create(**ask, stream=True))
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert stream[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_completions_tell_logprobs_in_their_own_shape(client):
    reply = client.completions.create(
        model=MODEL, prompt="One, two, three,", max_tokens=4, temperature=0, logprobs=3
    )
    told = reply.choices[0].logprobs
    assert "".join(told.tokens) == reply.choices[0].text
    assert len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == 4
    assert all(len(top) >= 3 for top in told.top_logprobs)


# Decisions


def test_decisions_answer_one_question_of_each_type(client):
    ask = dict(
        model=MODEL,
        input="Customer: my invoice for March was charged twice, please refund one of the two.",
        questions=[
            {"type": "predicate", "name": "refund", "instructions": "Does the customer ask for a refund?"},
            {
                "type": "choice",
                "instructions": "Which team?",
                "choices": [
                    {"value": "billing", "description": "invoices"},
                    {"value": "sales"},
                    {"value": True},
                ],
            },
            {"type": "score", "instructions": "How urgent?", "levels": [{"label": "low"}, {"label": "high"}]},
        ],
    )
    decision = client.decisions.create(**ask)
    predicate, choice, score = decision.answers
    assert (predicate.type, predicate.name, choice.type, choice.name) == (
        "predicate",
        "refund",
        "choice",
        None,
    )
    assert 0 < predicate.probability < 1
    assert [entry.value for entry in choice.probabilities] == ["billing", "sales", True]
    assert sum(entry.probability for entry in choice.probabilities) == pytest.approx(1)
    assert choice.choice == max(choice.probabilities, key=lambda entry: entry.probability).value
    assert [(entry.value, entry.label) for entry in score.probabilities] == [(0, "low"), (1, "high")]
    assert score.score == pytest.approx(score.probabilities[1].probability)
    assert decision.model == MODEL and decision.usage.total_tokens == decision.usage.input_tokens > 0
    again = client.decisions.create(**ask)
    assert again.answers == decision.answers
    assert again.usage.input_tokens == decision.usage.input_tokens
    assert again.usage.input_tokens_details.cached_tokens > 0


def test_decisions_take_messages(client):
    decision = client.decisions.create(
        model=MODEL,
        input=[
            {"role": "system", "content": "You sort mail."},
            {"role": "user", "content": [{"type": "input_text", "text": "Buy now!"}]},
        ],
        questions=[{"type": "predicate", "instructions": "Is the last message an advertisement?"}],
    )
    assert 0 < decision.answers[0].probability < 1


# Policies


def headers_of(raw) -> dict:
    return {name: raw.headers.get(f"x-forkpoint-{name}") for name in ("policy", "version", "route", "reason")}


def test_every_bundled_policy_is_served(server):
    policies = {policy["name"]: policy for policy in server.get("/v1/policies")["data"]}
    assert {"auto", "cheap-or-strong", "shell-gate", "scripted", "triage"} <= set(policies)
    errors = {name: policy["last_error"] for name, policy in policies.items() if policy["state"] != "serving"}
    assert errors == {}


def test_auto_answers_small_talk_without_the_model(client, server):
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=[{"role": "user", "content": "Hello!"}]
    )
    told = headers_of(raw)
    assert (told["policy"], told["route"], told["reason"]) == ("auto", "reply", "small-talk")
    assert told["version"] == server.get("/v1/policies/auto")["version"]
    reply = raw.parse()
    assert text_of(reply).startswith("Hello") and reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_auto_decides_and_answers_on_the_same_pages(client, stream):
    messages = [{"role": "user", "content": "Write two sentences about the Baltic Sea in winter."}]
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    raw = client.chat.completions.with_raw_response.create(
        model="auto", messages=messages, max_tokens=24, **options
    )
    told = headers_of(raw)
    assert (told["policy"], told["route"], told["reason"]) == ("auto", MODEL, "prose")
    if stream:
        chunks = list(raw.parse())
        text, usage = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices), chunks[-1].usage
    else:
        text, usage = text_of(raw.parse()), raw.parse().usage
    assert text.strip()
    ours = usage.model_extra["x_forkpoint"]
    # Probes answered: four questions, no token.
    assert (ours["decisions"], ours["decided_tokens"]) == (4, 0)
    # The reply continues from the session that was asked: nothing is computed twice.
    assert ours["reused"] + ours["computed"] == usage.prompt_tokens


@pytest.mark.parametrize(
    "text, status",
    [
        ("get rid of every docker volume on build-07, we need the space", 403),
        ("what does it mean to get rid of a docker volume?", 200),
        ("how many docker volumes are there on build-07?", 200),
    ],
)
@pytest.mark.parametrize("policy", ["auto", "shell-gate"])
def test_what_would_destroy_is_refused_by_what_it_means(client, policy, text, status):
    ask = {"model": policy, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    if status == 200:
        assert client.chat.completions.create(**ask).choices
        return
    with pytest.raises(openai.APIStatusError) as refused:
        client.chat.completions.create(**ask)
    assert (refused.value.status_code, refused.value.code) == (status, "shell-risk")


def test_the_shipped_probes_are_ready_and_better_than_label_reads(server):
    for policy in ["auto", "shell-gate", "cheap-or-strong"]:
        for name, probe in server.get(f"/v1/policies/{policy}")["probes"].items():
            quality = probe["quality"]
            assert probe["state"] == "ready", (policy, name, probe)
            assert quality["accuracy"] > quality["label_reads"]["accuracy"] + 0.2, (policy, name, quality)


def test_no_model_means_auto(client):
    raw = client.chat.completions.with_raw_response.create(
        model="", messages=[{"role": "user", "content": "Thanks!"}]
    )
    assert headers_of(raw)["policy"] == "auto"


def script(client, *lines, **options):
    messages = [{"role": "user", "content": "\n".join(lines)}]
    return client.chat.completions.with_raw_response.create(
        model=options.pop("model", "scripted"), messages=messages, max_tokens=8, **options
    )


@pytest.mark.parametrize("stream", [False, True])
def test_a_policy_replies(client, stream):
    raw = script(client, "because:told-so", "reply:Grüße, 世界 👋", stream=stream)
    assert headers_of(raw) | {"version": ""} == {
        "policy": "scripted",
        "version": "",
        "route": "reply",
        "reason": "told-so",
    }
    reply = raw.parse()
    text = "".join(c.choices[0].delta.content or "" for c in reply) if stream else text_of(reply)
    assert text == "Grüße, 世界 👋"


@pytest.mark.parametrize("stream", [False, True])
def test_a_policy_refuses_in_the_clients_terms(client, stream):
    with pytest.raises(openai.PermissionDeniedError) as refused:
        script(client, "because:risky", "reject:403:shell-risk:Ask a person.", stream=stream)
    assert refused.value.code == "shell-risk" and "Ask a person." in str(refused.value)
    told = headers_of(refused.value.response)
    assert (told["policy"], told["route"], told["reason"]) == ("scripted", "reject", "risky")


@pytest.mark.parametrize("stream", [False, True])
def test_a_policy_forwards_and_the_answer_comes_back_as_it_is(client, strong, stream):
    before = strong.metric("forkpoint_engine_generated_tokens_total")
    raw = script(client, "because:hard", "forward:strong", stream=stream)
    told = headers_of(raw)
    assert (told["policy"], told["route"], told["reason"]) == ("scripted", "strong", "hard")
    replies = list(raw.parse()) if stream else [raw.parse()]
    assert {reply.model for reply in replies} == {"qwen3-tiny"}
    assert strong.metric("forkpoint_engine_generated_tokens_total") > before


def test_an_upstream_that_is_gone_is_named(client):
    with pytest.raises(openai.InternalServerError) as gone:
        script(client, "forward:dead")
    assert gone.value.status_code == 502 and gone.value.code == "upstream_unreachable"
    assert "dead" in str(gone.value) and headers_of(gone.value.response)["route"] == "dead"


def test_a_plan_appends_turns_and_mounts_tools(client):
    plain = script(client, "generate").parse().usage.prompt_tokens
    told = script(client, "append:system Answer in one word.", "generate").parse().usage.prompt_tokens
    mounted = script(client, "mount:clock", "generate").parse().usage.prompt_tokens
    assert told > plain + 4 and mounted > plain + 10


def test_a_route_runs_its_chain_to_the_end(client):
    raw = script(client, "next", model="chain")
    assert headers_of(raw)["reason"] == "chain-exhausted"
    assert text_of(raw.parse())


@pytest.mark.parametrize(
    "command, reason", [("loop", "policy-cpu"), ("trap", "policy-trap"), ("error:x", "policy-error")]
)
def test_a_policy_that_fails_falls_back_to_the_model(client, command, reason):
    raw = script(client, command)
    told = headers_of(raw)
    assert (told["policy"], told["reason"]) == ("scripted", reason)
    assert text_of(raw.parse())


# Errors


def test_an_unknown_model_is_named_with_those_that_are_served(client):
    with pytest.raises(openai.NotFoundError) as error:
        chat(client, model="gpt-9")
    assert error.value.code == "model_not_found" and error.value.param == "model"
    assert "gpt-9" in str(error.value) and MODEL in str(error.value)
    for call in (
        lambda: client.models.retrieve("gpt-9"),
        lambda: client.completions.create(model="gpt-9", prompt="x"),
        lambda: client.decisions.create(
            model="gpt-9", input="x", questions=[{"type": "predicate", "instructions": "?"}]
        ),
    ):
        with pytest.raises(openai.NotFoundError) as error:
            call()
        assert error.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_is_refused_never_cut(client, stream):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, messages=[{"role": "user", "content": "word " * 9000}], stream=stream)
    assert error.value.code == "context_length_exceeded" and "8192" in str(error.value)
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, model="auto", messages=[{"role": "user", "content": "word " * 9000}], stream=stream)
    assert error.value.code == "context_length_exceeded"


IMAGE = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    "options, param, told",
    [
        (dict(messages=[]), "messages", "at least one"),
        (dict(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role", "wizard"),
        (dict(messages=[{"role": "user", "content": IMAGE}]), "messages[0].content[0].type", "images"),
        (dict(messages=[{"role": "user"}]), "messages[0].content", "required"),
        (dict(temperature=-1), "temperature", "-1"),
        (dict(temperature=float("1e30")), "temperature", ""),
        (dict(top_p=1.5), "top_p", "1.5"),
        (dict(n=2), "n", "1"),
        (dict(max_tokens=0), "max_tokens", "at least 1"),
        (dict(stop=[""]), "stop", "empty"),
        (dict(stop=[str(i) for i in range(17)]), "stop", "16"),
        (dict(top_logprobs=3), "top_logprobs", "logprobs"),
        (dict(logprobs=True, top_logprobs=21), "top_logprobs", "20"),
        (dict(frequency_penalty=0.5), "frequency_penalty", "not supported"),
        (dict(logit_bias={"5": 1}), "logit_bias", "not supported"),
        (dict(response_format={"type": "json_object"}), "response_format", "not supported|supported yet"),
        (dict(tools=[TOOL], tool_choice="required"), "tool_choice", "auto"),
        (dict(tools=[TOOL, TOOL]), "tools[1].function", "two tools"),
        (dict(extra_body={"max_tokens": "many"}), "max_tokens", ""),
        (dict(extra_body={"messages": "hi"}), "messages", ""),
        (dict(extra_body={"stream": "yes"}), "stream", ""),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_be_honoured_is_a_400_that_names_the_field(client, options, param, told):
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, **options)
    assert error.value.param == param, str(error.value)
    assert any(part in str(error.value) for part in told.split("|")), str(error.value)
    assert error.value.type == "invalid_request_error"


def test_fields_that_change_nothing_are_let_through(client):
    plain = text_of(chat(client, max_tokens=4))
    harmless = dict(
        n=1, frequency_penalty=0, response_format={"type": "text"}, user="u", store=False, metadata={"k": "v"}
    )
    assert text_of(chat(client, max_tokens=4, **harmless)) == plain


def test_a_key_is_asked_for_where_the_operator_set_one(keyed):
    ask = dict(model="qwen3-tiny", messages=ASK, max_tokens=2)
    for key in ("sk-one", "sk-two"):
        with openai.OpenAI(base_url=keyed.url + "/v1", api_key=key, max_retries=0) as client:
            assert client.chat.completions.create(**ask).choices
    with openai.OpenAI(base_url=keyed.url + "/v1", api_key="sk-on", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            client.chat.completions.create(**ask)
    assert error.value.code == "invalid_api_key"


def test_afterwards_nothing_is_held(server):
    server.wait_until_nothing_is_held()
