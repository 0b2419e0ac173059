"""Uses a pool through KVC's router as an application does, with the openai client.

Usage: pool_client.py BASE_URL MODEL

Exits non-zero, naming what it could not read.
"""

import asyncio
import sys

import openai

EXTRA = {"ignore_eos": True}
TASK = "Read the repository, then say what each of its programs does. " * 40


def check(what, ok, seen=None):
    if not ok:
        raise SystemExit(f"{what}: {seen!r}")


def refused(what, kind, status, call):
    """Returns the error that call raises; it must be of one class of the client's."""
    try:
        call()
    except kind as e:
        check(f"{what}: status", e.status_code == status, e)
        check(f"{what}: message", bool(e.message) and isinstance(e.body, dict), e.body)
        return e
    raise SystemExit(f"{what} was accepted")


def chat(client, model, messages, session, **kw):
    kw.setdefault("max_tokens", 16)
    return client.chat.completions.with_raw_response.create(
        model=model, messages=messages, extra_body=EXTRA, extra_headers={"x-session-id": session}, **kw)


def read(stream):
    """Puts a stream's chunks together."""
    text, roles, finish, usage = "", [], None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            roles += [choice.delta.role] if choice.delta.role else []
            finish = choice.finish_reason or finish
    return text, roles, finish, usage


def session(client, model):
    """Two turns whole, a third streamed: the first seeds, the others go to the resident worker."""
    messages = [
        {"role": "system", "content": "You are terse. Ünïcode, 日本語 and \"quotes\" are fine."},
        {"role": "user", "content": [{"type": "text", "text": TASK}]},
    ]
    raw = chat(client, model, messages, "two-turns")
    first = raw.parse()
    check("first turn's mode", raw.headers.get("x-kvc-mode") == "seed", raw.headers)
    home = raw.headers.get("x-kvc-worker")
    check("first turn's worker", bool(home), raw.headers)
    check("finish_reason", first.choices[0].finish_reason == "length", first)
    check("completion_tokens", first.usage.completion_tokens == 16, first.usage)
    check("total_tokens", first.usage.total_tokens == first.usage.prompt_tokens + 16, first.usage)
    check("request id", bool(raw.headers.get("x-request-id")), raw.headers)

    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Go on."}]
    raw = chat(client, model, messages, "two-turns")
    second = raw.parse()
    check("second turn's mode", raw.headers.get("x-kvc-mode") == "direct", raw.headers)
    check("second turn's worker", raw.headers.get("x-kvc-worker") == home, raw.headers)
    details = second.usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    check("second turn's cached tokens", first.usage.prompt_tokens // 16 * 16 <= cached < second.usage.prompt_tokens,
          second.usage)

    messages += [{"role": "assistant", "content": second.choices[0].message.content}, {"role": "user", "content": "And?"}]
    raw = chat(client, model, messages, "two-turns", stream=True, stream_options={"include_usage": True})
    check("third turn's mode", raw.headers.get("x-kvc-mode") == "direct", raw.headers)
    text, roles, finish, usage = read(raw.parse())
    check("one role chunk", roles == ["assistant"], roles)
    check("streamed finish", finish == "length", finish)
    check("streamed words", len(text.split()) == 16, text)
    check("streamed usage", usage is not None and usage.completion_tokens == 16, usage)


def usage_only_when_asked(client, model):
    """The router needs usage for itself; a client that did not ask must not see it."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    _, _, finish, usage = read(chat(client, model, messages, "no-usage", stream=True).parse())
    check("a stream without include_usage", finish == "length" and usage is None, usage)


def completions(client, model):
    done = client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, extra_body=EXTRA)
    check("completion", done.usage.completion_tokens == 8 and done.choices[0].finish_reason == "length", done)
    text, usage = "", None
    for chunk in client.completions.create(model=model, prompt="Once upon a time", max_tokens=8, extra_body=EXTRA,
                                           stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        text += "".join(c.text for c in chunk.choices)
    check("streamed completion", text == done.choices[0].text, (text, done))
    check("streamed completion's usage", usage is not None and usage.completion_tokens == 8, usage)


def errors(client, model):
    one = [{"role": "user", "content": "hello"}]
    create = client.chat.completions.create
    e = refused("an unknown model", openai.NotFoundError, 404, lambda: create(model="nobody", messages=one))
    check("an unknown model's code", e.code == "model_not_found", e.body)
    e = refused("n=2", openai.BadRequestError, 400, lambda: create(model=model, messages=one, n=2))
    check("n=2's param", e.param == "n", e.body)
    refused("n=2, streamed", openai.BadRequestError, 400, lambda: create(model=model, messages=one, n=2, stream=True))
    refused("an array for a body", openai.BadRequestError, 400,
            lambda: client.post("/chat/completions", body=[1, 2], cast_to=object))
    refused("an empty conversation", openai.BadRequestError, 400, lambda: create(model=model, messages=[]))
    refused("an empty conversation, streamed", openai.BadRequestError, 400,
            lambda: create(model=model, messages=[], stream=True))
    refused("a path that is not served", openai.NotFoundError, 404,
            lambda: client.embeddings.create(model=model, input="x"))


def abort(client, model):
    """Leaves in the middle of a stream; the session goes on afterwards."""
    messages = [{"role": "user", "content": TASK}]
    stream = chat(client, model, messages, "abort", stream=True, max_tokens=20000).parse()
    seen = 0
    for chunk in stream:
        seen += bool(chunk.choices and chunk.choices[0].delta.content)
        if seen == 3:
            break
    stream.close()
    check("chunks before the abort", seen == 3, seen)
    again = chat(client, model, messages, "abort").parse()
    check("a turn after the abort", again.usage.completion_tokens == 16, again)


async def crowd(url, model):
    """Sessions side by side, streams read to their ends."""
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        async def one(i):
            messages = [{"role": "user", "content": f"Task {i}. {TASK}"}]
            modes = []
            for _ in range(3):
                raw = await client.chat.completions.with_raw_response.create(
                    model=model, messages=messages, max_tokens=12, stream=True, extra_body=EXTRA,
                    extra_headers={"x-session-id": f"crowd-{i}"})
                modes.append(raw.headers.get("x-kvc-mode"))
                text = ""
                async for chunk in raw.parse():
                    text += "".join(c.delta.content or "" for c in chunk.choices)
                check("a crowd's answer", len(text.split()) == 12, text)
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
            return modes

        seen = await asyncio.gather(*(one(i) for i in range(6)))
        check("a crowd's modes", all(m == ["seed", "direct", "direct"] for m in seen), seen)


def main():
    url, model = sys.argv[1:]
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)
    models = [m.id for m in client.models.list()]
    check("models", model in models, models)
    session(client, model)
    usage_only_when_asked(client, model)
    completions(client, model)
    errors(client, model)
    abort(client, model)
    asyncio.run(crowd(url, model))
    print("ok")


if __name__ == "__main__":
    main()
