"""Reads an OpenAI-compatible server with the openai client.

Usage: openai_client.py BASE_URL [--local-prefill]

Exits non-zero, naming what it could not read.
"""

import argparse

import openai


def check(what, ok, seen=None):
    if not ok:
        raise SystemExit(f"{what}: {seen!r}")


def main():
    args = argparse.ArgumentParser()
    args.add_argument("base_url")
    args.add_argument("--model", default="m")
    args.add_argument("--api-key", default="none")
    args.add_argument("--local-prefill", action="store_true")
    args = args.parse_args()

    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0, timeout=60)
    extra = {"ignore_eos": True}
    if args.local_prefill:
        extra["do_local_prefill"] = True

    models = [m.id for m in client.models.list()]
    check("models", models == [args.model], models)

    messages = [
        {"role": "system", "content": "You are terse. Ünïcode, 日本語 and \"quotes\" are fine."},
        {"role": "user", "content": [{"type": "text", "text": "Tell me a story."}]},
    ]

    def chat(**kw):
        return client.chat.completions.create(
            model=args.model, messages=messages, max_tokens=16, extra_body=extra, **kw)

    whole = chat()
    check("finish_reason", whole.choices[0].finish_reason == "length", whole)
    check("completion_tokens", whole.usage.completion_tokens == 16, whole.usage)
    check("total_tokens", whole.usage.total_tokens == whole.usage.prompt_tokens + 16, whole.usage)
    text = whole.choices[0].message.content
    check("content", len(text.split()) == 16, text)

    streamed, roles, finish, usage = "", [], None, None
    for chunk in chat(stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            streamed += choice.delta.content or ""
            if choice.delta.role:
                roles.append(choice.delta.role)
            finish = choice.finish_reason or finish
    check("streamed text", streamed == text, streamed)
    check("one role chunk", roles == ["assistant"], roles)
    check("streamed finish", finish == "length", finish)
    check("streamed usage", usage is not None and usage.completion_tokens == 16, usage)

    # The next turn reuses the conversation, generated text included.
    before = usage.prompt_tokens
    messages.append({"role": "assistant", "content": text})
    messages.append({"role": "user", "content": "Go on."})
    after = chat().usage
    cached = after.prompt_tokens_details.cached_tokens if after.prompt_tokens_details else 0
    check("the next turn's cached tokens", before // 16 * 16 <= cached < after.prompt_tokens, after)

    done = client.completions.create(
        model=args.model, prompt="Once upon a time", max_tokens=8, extra_body={"ignore_eos": True}
    ) if not args.local_prefill else None
    check("completion", done is None or done.usage.completion_tokens == 8, done)

    try:
        client.chat.completions.create(model=args.model, messages=[], max_tokens=1)
    except openai.BadRequestError as e:
        check("error status", e.status_code == 400, e)
    else:
        raise SystemExit("an empty conversation was accepted")
    print("ok")


if __name__ == "__main__":
    main()
